"""The hidden-state store: layout, codecs, writer, reader, integrity, data order, and the `dflash-cache` command."""
