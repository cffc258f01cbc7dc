"""The `aiordma` command. It needs click and rich: pip install 'aiordma[tools]'."""
