"""Parts of `bench_bake.py`: what is asked, ways to make a model act as if it had a context, and how they are judged."""
