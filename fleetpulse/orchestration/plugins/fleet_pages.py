"""Airflow plugin: pages below ``/fleet``; the operations page and the Data Docs in the navigation.

Rule: the operations page has no ``url_route``, so it opens as a page of its own. Airflow would show a view with a
route in a frame, in which links to Airflow and addresses of filters do not work. It has no ``nav_top_level`` either:
Airflow 3.3 shows such a view without a route as a button that opens nothing.
"""

from airflow.plugins_manager import AirflowPlugin

from fleetpulse.orchestration.config import CONFIG
from fleetpulse.orchestration.pages.serving import PREFIX, DataDocsLink, PagesApp, ReportLink


class FleetPages(AirflowPlugin):
    """Pages and links that extend Airflow's own UI."""

    name = "fleet_pages"
    fastapi_apps = [{"app": PagesApp(CONFIG), "url_prefix": PREFIX, "name": "fleet pages"}]  # noqa: RUF012 - Airflow expects lists
    external_views = [  # noqa: RUF012 - as above
        {"name": "Fleet", "href": f"{PREFIX}/ui/", "destination": "nav"},
        {"name": "Data Docs", "href": f"{PREFIX}/quality/index.html", "destination": "nav", "url_route": "data-docs"},
    ]
    operator_extra_links = [ReportLink(), DataDocsLink()]  # noqa: RUF012 - as above
