"""Operators that backtest a policy from the form of the DAG ``fleet_backtest``.

Rule 1: each run has a folder. It holds the submitted policy and the resulting page.
Rule 2: the verb and its arguments are the same in a local process and on Spark.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from fleetpulse.core.errors import FleetError
from fleetpulse.orchestration.config import CONFIG, ROOT, OrchestrationConfig, backtest_folder
from fleetpulse.orchestration.operators.verbs import FleetOperator, drop_empty_arguments, publish_reason
from fleetpulse.orchestration.pages.serving import ReportLink
from fleetpulse.orchestration.subprocess import ERROR_PREFIX

SPARK: Final = "spark_default"  # Airflow connection of the Spark master
_ARGUMENTS: Final = ("backtest", "--from={{ params['from'] or '' }}", "--to={{ params.to or '' }}")
_RUN: Final = "{{ run_id }}"


def files(place: OrchestrationConfig, run: str) -> list[str]:
    """Return the arguments for the paths of a run's policy and page."""
    folder = backtest_folder(place.data_folder, run)
    return [f"--policy={folder / 'policy.toml'}", f"--html={folder / 'report.html'}"]


class WritePolicy(BaseOperator):
    """Write the policy of the form to the folder of the run."""

    template_fields: ClassVar[Sequence[str]] = ("policy", "run_name")

    def __init__(self, *, place: OrchestrationConfig = CONFIG, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place = place
        self.policy = "{{ params.policy }}"
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> str:
        """Write the policy; return the path of the folder."""
        folder = backtest_folder(self.place.data_folder, self.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.toml").write_text(self.policy)
        return str(folder)


class Backtest(FleetOperator):
    """Backtest in a process on this machine; return the figures and the page's path."""

    template_fields: ClassVar[Sequence[str]] = ("words", "run_name")
    operator_extra_links = (ReportLink(),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=[*_ARGUMENTS, "--json"], gives="json", **kwargs)
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb; return the path of the page and the figures."""
        self.words = [*self.words, *files(self.place, self.run_name)]
        page = backtest_folder(self.place.data_folder, self.run_name) / "report.html"
        return {"page": str(page), "figures": super().execute(context)}


class BacktestOnSpark(SparkSubmitOperator):
    """Backtest on the cluster of ``spark_default``; return the path of the page."""

    template_fields: ClassVar[Sequence[str]] = ("words", "run_name")
    operator_extra_links = (ReportLink(),)

    def __init__(self, *, place: OrchestrationConfig = CONFIG, **kwargs: Any) -> None:
        super().__init__(conn_id=SPARK, application=str(ROOT / "cli" / "__main__.py"), name="fleet-backtest", **kwargs)
        self.place = place
        self.words = [*_ARGUMENTS, "--spark"]
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb by spark-submit, with the settings of the command's own sessions.

        The settings are passed here, since the JVM already runs before the verb could apply them. A
        cluster that the connection names replaces the setting ``spark_master``. The verb itself reads
        the secret of the cluster.

        Raises:
            AirflowFailException: the verb refused; the first line is its error message. Or the
                settings of the cluster are invalid.
        """
        from fleetpulse.io.spark.java import find_java
        from fleetpulse.io.spark.session import SparkResources, settings
        from fleetpulse.settings import load_settings

        folder = backtest_folder(self.place.data_folder, self.run_name)
        arguments = [*self.words, *files(self.place, self.run_name)]
        self.application_args = [*drop_empty_arguments(arguments), "--home", str(self.place.home)]
        try:
            master = self._master()
            loaded = load_settings(self.place.home).model_copy(update={"spark_master": master})
            usual = settings(folder, SparkResources.of(self.place.home, loaded))
        except (FleetError, ValueError) as error:
            publish_reason(context, str(error))
            raise AirflowFailException(str(error)) from None
        self.conf = {name: value for name, value in usual.items() if name != "spark.master"}
        self.env_vars = {
            **{name: "" for name in os.environ if "AIRFLOW" in name},  # hides Airflow's secrets from the verb
            "FLEET_SPARK_MASTER": master,
            "JAVA_HOME": str(find_java()),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",  # keeps ``cli/`` off sys.path, so that its modules shadow no others
        }
        try:
            super().execute(context)  # pyright: ignore[reportArgumentType]  # Airflow's context is a mapping
        except AirflowException as error:
            before, found, sentence = str(error).rpartition(ERROR_PREFIX)
            if not found:
                raise
            publish_reason(context, sentence)
            raise AirflowFailException(f"{sentence}\n{before}") from None
        return {"page": str(folder / "report.html")}

    def _master(self) -> str:
        """Return the master of the connection, as the setting ``spark_master`` writes it.

        Raises:
            ValueError: it is neither local nor a standalone cluster.
        """
        from fleetpulse.io.spark.pods import KUBERNETES
        from fleetpulse.settings import LOCAL, spark_master_of

        try:
            master = str(SparkSubmitHook(conn_id=SPARK)._connection["master"])  # noqa: SLF001 - the provider has no public name
        except (RuntimeError, NameError):  # Airflow's provider of Kubernetes, whose module it uses, is not installed
            master = KUBERNETES
        if master.startswith(KUBERNETES):
            raise ValueError(
                f"the connection {SPARK} names a Kubernetes, where the operator of Airflow passes no variables to a driver in "
                f"client mode; write local[2] or the address of a standalone cluster into the connection, or run the backtest "
                f"without the field spark"
            )
        return LOCAL if re.fullmatch(r"local(\[.*\])?", master) else spark_master_of(master)
