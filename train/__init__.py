"""Hidden-state store -> packs -> drafter -> checkpoints, evaluation, export; the `dflash-train` command."""
