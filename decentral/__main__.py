"""``python -m decentral`` is the command ``decentral``."""

from decentral.cli import main

if __name__ == "__main__":
    main()
