"""``python -m trimtab``: the same as the command ``trimtab``, for launchers that start modules."""

from trimtab.cli import main

if __name__ == "__main__":
    main()
