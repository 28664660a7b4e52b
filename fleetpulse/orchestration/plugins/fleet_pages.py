"""Airflow plugin: pages below ``/fleet``, and the Data Docs in the navigation."""

from airflow.plugins_manager import AirflowPlugin

from fleetpulse.orchestration.config import CONFIG
from fleetpulse.orchestration.pages import PREFIX, DataDocsLink, PagesApp, ReportLink


class FleetPages(AirflowPlugin):
    """Pages and links that extend Airflow's own UI."""

    name = "fleet_pages"
    fastapi_apps = [{"app": PagesApp(CONFIG), "url_prefix": PREFIX, "name": "fleet pages"}]  # noqa: RUF012 - Airflow expects lists
    external_views = [  # noqa: RUF012 - as above
        {"name": "Data Docs", "href": f"{PREFIX}/quality/index.html", "destination": "nav", "url_route": "data-docs"}
    ]
    operator_extra_links = [ReportLink(), DataDocsLink()]  # noqa: RUF012 - as above
