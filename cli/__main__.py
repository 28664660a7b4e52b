"""Entry point of ``python -m cli``, which equals ``fleet``."""

from cli.entry import run

if __name__ == "__main__":
    run()
