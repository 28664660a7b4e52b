"""Operations page: HTML and SVG that the server renders.

A module has the pages of one subject; ``templates/`` beside this package has their HTML. `web.app` imports it; it
imports `web.api`, so that a page shows the rows that the API answers with. Begin with ``routes.py`` (all addresses) and
``rendering.py`` (templates, static files, freshness).
"""
