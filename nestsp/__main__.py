"""``python -m nestsp``: the command line, also as one rank under torchrun."""

from __future__ import annotations

from nestsp.cli.main import main

if __name__ == "__main__":
    main()
