"""Conversations -> tokens and loss masks -> target forward -> hidden-state store; the `dflash-precompute` command."""
