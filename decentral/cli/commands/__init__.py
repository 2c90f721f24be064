"""The commands of ``decentral``, one file per family."""
