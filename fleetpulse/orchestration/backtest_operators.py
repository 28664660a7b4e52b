"""A backtest from a form: the policy is text, and the page that comes of it has a place of its own.

Rule 1: each run has a folder; what a person typed, and what came of it, lie side by side in it.
Rule 2: the verb is the same, with the same arguments, whether it is a process of ours or is handed to Spark.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from fleetpulse.orchestration.config import PLACE, ROOT, OrchestrationConfig, folder_of
from fleetpulse.orchestration.operators import FleetOperator, given, leave
from fleetpulse.orchestration.pages import ReportLink
from fleetpulse.orchestration.subprocess import SENTENCE

SPARK: Final = "spark_default"  # the connection that names the master
_WORDS: Final = ("backtest", "--from={{ params['from'] or '' }}", "--to={{ params.to or '' }}")
_RUN: Final = "{{ run_id }}"


def files(place: OrchestrationConfig, run: str) -> list[str]:
    """Return the arguments that name the run's policy and its page."""
    folder = folder_of(place.notes, run)
    return [f"--policy={folder / 'policy.toml'}", f"--html={folder / 'report.html'}"]


class WritePolicy(BaseOperator):
    """Write the policy of the form down, and choose how the history is judged: the result is the task that goes on."""

    template_fields: ClassVar[Sequence[str]] = ("policy", "run_name")

    def __init__(self, *, place: OrchestrationConfig = PLACE, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place = place
        self.policy = "{{ params.policy }}"
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> str:
        """Write it; return where."""
        folder = folder_of(self.place.notes, self.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.toml").write_text(self.policy)
        return str(folder)


class Backtest(FleetOperator):
    """Try the policy in a process of this machine; the result is the figures, and where the page lies."""

    template_fields: ClassVar[Sequence[str]] = ("words", "run_name")
    operator_extra_links = (ReportLink(),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=[*_WORDS, "--json"], gives="json", **kwargs)
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb, and say where its page lies."""
        self.words = [*self.words, *files(self.place, self.run_name)]
        page = folder_of(self.place.notes, self.run_name) / "report.html"
        return {"page": str(page), "figures": super().execute(context)}


class BacktestOnSpark(SparkSubmitOperator):
    """Try the policy on the cluster that the connection ``spark_default`` names; the result says where the page lies."""

    template_fields: ClassVar[Sequence[str]] = ("words", "run_name")
    operator_extra_links = (ReportLink(),)

    def __init__(self, *, place: OrchestrationConfig = PLACE, **kwargs: Any) -> None:
        super().__init__(conn_id=SPARK, application=str(ROOT / "cli" / "__main__.py"), name="fleet-backtest", **kwargs)
        self.place = place
        self.words = [*_WORDS, "--spark"]
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Hand the verb to spark-submit, with the settings of our own sessions: the machine is up before ours could set them.

        Raises:
            AirflowFailException: the verb refused; the first line is its sentence.
        """
        from fleetpulse.io.spark.java import find_java
        from fleetpulse.io.spark.session import SparkResources, settings
        from fleetpulse.settings import load_settings

        wanted = load_settings(self.place.home)
        folder = folder_of(self.place.notes, self.run_name)
        words = [*self.words, *files(self.place, self.run_name)]
        self.application_args = [*given(words), "--home", str(self.place.home)]
        self.conf = {
            name: value
            for name, value in settings(folder, SparkResources(wanted.cores, wanted.heap)).items()
            if name != "spark.master"
        }
        self.env_vars = {
            **{name: "" for name in os.environ if "AIRFLOW" in name},  # its secrets are not the verb's
            "JAVA_HOME": str(find_java()),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",  # the folder of the application is a room, whose names are not to hide others
        }
        try:
            super().execute(context)  # pyright: ignore[reportArgumentType]  # Airflow's context is a mapping
        except AirflowException as error:
            before, found, sentence = str(error).rpartition(SENTENCE)
            if not found:
                raise
            leave(context, sentence)
            raise AirflowFailException(f"{sentence}\n{before}") from None
        return {"page": str(folder / "report.html")}
