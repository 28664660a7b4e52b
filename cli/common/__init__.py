"""Parts shared by verbs: options, output, dry runs, and the Python environment.

It imports only the library; all other packages of ``cli`` import it.
``bootstrap.py`` imports only the standard library: it runs before anything is installed.
Start reading at ``options.py`` and ``output.py``.
"""
