"""`python -m aiordma` is the `aiordma` command."""

from aiordma.tools.main import main

if __name__ == "__main__":
    main()
