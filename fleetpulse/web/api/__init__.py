"""Read-only HTTP API below ``/api/v1``, with its OpenAPI document.

A module has the routes of one subject, each declared by an `Operation`. `web.app` and `web.pages` import it; it
imports the facts in memory, `web.queries` and `fleetpulse.reports`. Begin with ``routes.py`` (all declarations) and
``answers.py`` (JSON with a version, CSV and NDJSON).
"""
