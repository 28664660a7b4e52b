"""``python -m cli`` is ``fleet``."""

from cli.entry import run

if __name__ == "__main__":
    run()
