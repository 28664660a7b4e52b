"""Evaluation of data-quality suites by Great Expectations, on pandas or Spark.

Results are the same for a pandas and a Spark DataFrame.

Rule 1: suites define the expectations; this module only translates them to the library's classes.
Rule 2: all failing rows are counted, but only as many are fetched as are shown.
Rule 3: results and the pages made from them are stored by run, and removed by run, oldest first.
"""

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.quality.suites import Expectation, Form, Suite
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.io.system.locks import exclusive_lock

SHOWN: Final = 100  # failing rows shown per expectation, with their keys
_IN_MEMORY: Final = {"class_name": "InMemoryStoreBackend"}
_STORES: Final = {
    "expectations_store": "ExpectationsStore",
    "checkpoint_store": "CheckpointStore",
    "validation_definition_store": "ValidationDefinitionStore",
}
_DOCS: Final = "docs"
_RESULTS: Final = "results"
_NOTHING: Final = ("NaTType", "NAType")  # types of pandas' missing values
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """Result of one expectation.

    Attributes:
        expectation: expectation that was evaluated.
        rows: number of rows evaluated.
        failed: number of failing rows.
        shown: some of the failing rows: values of the suite's key and shown columns, by column.
        fault: reason why the expectation could not be evaluated; empty if it was.
    """

    expectation: Expectation
    rows: int
    failed: int
    shown: tuple[Row, ...] = ()
    fault: str = ""


def _filesystem(folder: Path) -> dict[str, Any]:
    return {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder)}


@dataclass(slots=True)
class Expectations:
    """Context of Great Expectations that stores results and pages in a folder.

    Attributes:
        folder: folder of results and pages.
        run: name of this run, under which its results are stored.
    """

    folder: Path
    run: str
    _context: Any = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()  # the library requires an absolute path
        os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the library is imported
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        import great_expectations as gx  # takes seconds, and is installed only with the extra "operations"
        from great_expectations.data_context.types.base import DataContextConfig, ProgressBarsConfig

        stores = {name: {"class_name": kind, "store_backend": _IN_MEMORY} for name, kind in _STORES.items()}
        results = {"class_name": "ValidationResultsStore", "store_backend": _filesystem(self.folder / _RESULTS)}
        site = {
            "class_name": "SiteBuilder",
            "show_how_to_buttons": False,
            "store_backend": _filesystem(self.folder / _DOCS),
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        }
        config = DataContextConfig(
            config_version=4,
            stores={**stores, "validation_results_store": results},
            expectations_store_name="expectations_store",
            checkpoint_store_name="checkpoint_store",
            validation_results_store_name="validation_results_store",
            data_docs_sites={_DOCS: site},
            analytics_enabled=False,
            progress_bars=ProgressBarsConfig(globally=False),
        )
        self._context = gx.get_context(mode="ephemeral", project_config=config)

    @property
    def page(self) -> Path:
        """Index page of the pages that `build_docs` creates."""
        return self.folder / _DOCS / "index.html"

    def evaluate(self, suite: Suite, frame: Any, shown: int = SHOWN) -> list[ExpectationResult]:
        """Evaluate a suite over its rows, and store the result.

        Args:
            suite: suite to evaluate.
            frame: rows of the suite, a pandas or Spark DataFrame.
            shown: number of failing rows to fetch per expectation.

        Returns:
            Result of each expectation, in the order of the suite.
        """
        import great_expectations as gx
        from great_expectations.core.run_identifier import RunIdentifier

        known = self._register(suite)
        defined = gx.ValidationDefinition(name=suite.name, data=self._batch(suite.name, frame), suite=known)
        definition = self._context.validation_definitions.add_or_update(defined)
        result_format = {
            "result_format": "SUMMARY",  # fetches a limited number of failing rows; COMPLETE would fetch all
            "partial_unexpected_count": shown,
            "unexpected_index_column_names": list(dict.fromkeys([*suite.key, *suite.shown])),
            "return_unexpected_index_query": False,
        }
        run_result = definition.run(
            batch_parameters={"dataframe": frame}, run_id=RunIdentifier(run_name=self.run), result_format=result_format
        )
        answers = {one.expectation_config.meta["name"]: one for one in run_result.results}
        return [_evaluated(one, answers[one.name]) for one in suite.expectations]

    def _register(self, suite: Suite) -> Any:
        import great_expectations as gx

        asked = [_gx_expectation(one) for one in suite.expectations]
        return self._context.suites.add_or_update(gx.ExpectationSuite(name=suite.name, expectations=asked))

    def _batch(self, name: str, frame: Any) -> Any:
        on_spark = type(frame).__module__.startswith("pyspark")
        source = "spark" if on_spark else "pandas"
        try:
            place = self._context.data_sources.get(source)
        except KeyError:
            add = self._context.data_sources
            place = add.add_spark(source, persist=False) if on_spark else add.add_pandas(source)
        try:
            asset = place.get_asset(name)
        except LookupError:
            asset = place.add_dataframe_asset(name)
            return asset.add_batch_definition_whole_dataframe("whole")
        return asset.get_batch_definition("whole")

    def build_docs(self, *, rebuild_all: bool = False) -> Path:
        """Create missing pages of results, and the index page.

        All suites are registered first, because the library removes pages of unknown suites.

        Args:
            rebuild_all: whether the pages of all stored results are created again.

        Returns:
            Path of the index page.
        """
        for suite in SUITES:
            self._register(suite)
        with self._pages_locked():
            suites = self._context.expectations_store.list_keys()
            missing = [key for key in self._context.validation_results_store.list_keys() if not self._page_of(key).exists()]
            self._context.build_data_docs(resource_identifiers=None if rebuild_all else [*suites, *missing])
        return self.page

    def _page_of(self, key: Any) -> Path:
        *folders, name = key.to_tuple()
        return self.folder.joinpath(_DOCS, "validations", *folders, f"{name}.html")

    def prune(self, keep: int) -> list[str]:
        """Remove results and pages of all but the newest runs.

        Args:
            keep: number of runs to keep.

        Returns:
            Names of the removed runs.
        """
        with self._pages_locked():
            runs = sorted({path.name for path in (self.folder / _RESULTS).glob("*/*") if path.is_dir()})
            removed = runs[: max(0, len(runs) - keep)]
            for run in removed:
                for path in [*(self.folder / _RESULTS).glob(f"*/{run}"), *(self.folder / _DOCS / "validations").glob(f"*/{run}")]:
                    shutil.rmtree(path, ignore_errors=True)
        return removed

    def _pages_locked(self) -> AbstractContextManager[None]:
        """Lock the pages against other processes.

        The library lists the results, and then removes pages whose result was not in the list.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return exclusive_lock(self.folder / "pages.lock")


def _gx_expectation(one: Expectation) -> Any:
    """Convert an expectation to an object of the library."""
    gxe: Any = import_module("great_expectations.expectations")  # the library exports its names at run time

    common: dict[str, Any] = {"description": one.meaning, "severity": one.severity.value, "meta": {"name": one.name}}
    match one.form:
        case Form.PRESENT:
            return gxe.ExpectColumnValuesToNotBeNull(column=one.column, **common)
        case Form.ONE_OF:
            return gxe.ExpectColumnValuesToBeInSet(column=one.column, value_set=list(map(str, one.allowed_values)), **common)
        case Form.HOLDS:
            return gxe.ExpectColumnValuesToBeInSet(column=one.column, value_set=[True], **common)


def _evaluated(one: Expectation, answer: Any) -> ExpectationResult:
    result = answer.result
    if "element_count" not in result:
        return ExpectationResult(one, 0, 0, fault=_fault(answer.exception_info))
    rows = tuple(
        {name: _plain(value) for name, value in row.items() if name != one.column or one.form is not Form.HOLDS}
        for row in result.get("partial_unexpected_index_list") or ()
    )
    return ExpectationResult(one, int(result["element_count"]), int(result.get("unexpected_count") or 0), rows)


def _fault(info: Mapping[str, Any]) -> str:
    nested: Iterable[Any] = [info, *(value for value in info.values() if isinstance(value, Mapping))]
    messages = [str(one["exception_message"]) for one in nested if one.get("exception_message")]
    return messages[0].splitlines()[0][:400] if messages else "Great Expectations returned no result"


def _plain(value: Any) -> Any:
    """Convert a value of pandas or Spark to a Python value; None if it is missing."""
    if value is None or type(value).__name__ in _NOTHING or value != value:  # noqa: PLR0124 - NaN
        return None
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)  # Spark's timestamps are UTC without a zone
    return value.item() if hasattr(value, "item") else value
