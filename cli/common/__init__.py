"""Parts that several verbs share: options, output, dry runs, the environment that ``./fleet`` makes.

It imports the library alone. ``bootstrap.py`` imports nothing: it runs before anything is
installed.
"""
