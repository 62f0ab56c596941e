"""Parts of `attack.py` that need a process of their own."""
