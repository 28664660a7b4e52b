"""Suites evaluated by Great Expectations: over a pandas DataFrame or a Spark one, with the same answers.

Rule 1: what is asked stands in the suite; here it is only put into the words of that library.
Rule 2: of rows that fail no more are fetched than are to be shown, however many there are; how many there are is counted.
Rule 3: results are kept by run, and pages made of them; both are removed by run, the oldest first.
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
from fleetpulse.io.system.locks import briefly

SHOWN: Final = 100  # rows that fail an expectation, with their keys
_IN_MEMORY: Final = {"class_name": "InMemoryStoreBackend"}
_STORES: Final = {
    "expectations_store": "ExpectationsStore",
    "checkpoint_store": "CheckpointStore",
    "validation_definition_store": "ValidationDefinitionStore",
}
_DOCS: Final = "docs"
_RESULTS: Final = "results"
_NOTHING: Final = ("NaTType", "NAType")  # pandas' words for it
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of one expectation.

    Attributes:
        expectation: which.
        rows: how many there are.
        failed: how many of them fail.
        shown: some of these, by column: the suite's key, and what it shows.
        fault: why it could not be evaluated; empty where it could.
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
    """The library, with its results in a folder.

    Attributes:
        folder: of results and pages.
        run: names the results of this run.
    """

    folder: Path
    run: str
    _context: Any = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()  # it takes no other
        os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when it is imported
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        import great_expectations as gx  # it costs seconds, and is there only where operations are
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
        """The first page of what `build_docs` makes."""
        return self.folder / _DOCS / "index.html"

    def evaluate(self, suite: Suite, frame: Any, shown: int = SHOWN) -> list[Evaluated]:
        """Evaluate a suite over its rows, and keep the result.

        Args:
            suite: which.
            frame: its rows, as pandas or Spark has them.
            shown: how many rows that fail are fetched of each expectation.
        """
        import great_expectations as gx
        from great_expectations.core.run_identifier import RunIdentifier

        known = self._know(suite)
        defined = gx.ValidationDefinition(name=suite.name, data=self._batch(suite.name, frame), suite=known)
        definition = self._context.validation_definitions.add_or_update(defined)
        wanted = {
            "result_format": "SUMMARY",  # unlike COMPLETE it fetches so many rows, and not all that fail
            "partial_unexpected_count": shown,
            "unexpected_index_column_names": list(dict.fromkeys([*suite.key, *suite.shown])),
            "return_unexpected_index_query": False,
        }
        told = definition.run(
            batch_parameters={"dataframe": frame}, run_id=RunIdentifier(run_name=self.run), result_format=wanted
        )
        answers = {one.expectation_config.meta["name"]: one for one in told.results}
        return [_evaluated(one, answers[one.name]) for one in suite.expectations]

    def _know(self, suite: Suite) -> Any:
        import great_expectations as gx

        asked = [_asked(one) for one in suite.expectations]
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

    def build_docs(self, *, anew: bool = False) -> Path:
        """Make the pages that are missing, and the first page, which names all that are kept; return that one.

        The library removes the page of each suite that it does not know, whoever made it: so it is told of all of them.

        Args:
            anew: make the pages of all results that are kept.
        """
        for suite in SUITES:
            self._know(suite)
        with self._alone():
            suites = self._context.expectations_store.list_keys()
            missing = [key for key in self._context.validation_results_store.list_keys() if not self._page_of(key).exists()]
            self._context.build_data_docs(resource_identifiers=None if anew else [*suites, *missing])
        return self.page

    def _page_of(self, key: Any) -> Path:
        *folders, name = key.to_tuple()
        return self.folder.joinpath(_DOCS, "validations", *folders, f"{name}.html")

    def prune(self, keep: int) -> list[str]:
        """Remove results and pages of all but the newest runs; return which."""
        with self._alone():
            runs = sorted({path.name for path in (self.folder / _RESULTS).glob("*/*") if path.is_dir()})
            gone = runs[: max(0, len(runs) - keep)]
            for run in gone:
                for path in [*(self.folder / _RESULTS).glob(f"*/{run}"), *(self.folder / _DOCS / "validations").glob(f"*/{run}")]:
                    shutil.rmtree(path, ignore_errors=True)
        return gone

    def _alone(self) -> AbstractContextManager[None]:
        """Keep others from the pages: the library lists what there is, and then removes what it did not find."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return briefly(self.folder / "pages.lock")


def _asked(one: Expectation) -> Any:
    """Return an expectation in the library's words."""
    gxe: Any = import_module("great_expectations.expectations")  # its names are exported at run time

    common: dict[str, Any] = {"description": one.meaning, "severity": one.severity.value, "meta": {"name": one.name}}
    match one.form:
        case Form.PRESENT:
            return gxe.ExpectColumnValuesToNotBeNull(column=one.column, **common)
        case Form.ONE_OF:
            return gxe.ExpectColumnValuesToBeInSet(column=one.column, value_set=list(map(str, one.words)), **common)
        case Form.HOLDS:
            return gxe.ExpectColumnValuesToBeInSet(column=one.column, value_set=[True], **common)


def _evaluated(one: Expectation, answer: Any) -> Evaluated:
    told = answer.result
    if "element_count" not in told:
        return Evaluated(one, 0, 0, fault=_fault(answer.exception_info))
    rows = tuple(
        {name: _plain(value) for name, value in row.items() if name != one.column or one.form is not Form.HOLDS}
        for row in told.get("partial_unexpected_index_list") or ()
    )
    return Evaluated(one, int(told["element_count"]), int(told.get("unexpected_count") or 0), rows)


def _fault(info: Mapping[str, Any]) -> str:
    nested: Iterable[Any] = [info, *(value for value in info.values() if isinstance(value, Mapping))]
    said = [str(one["exception_message"]) for one in nested if one.get("exception_message")]
    return said[0].splitlines()[0][:400] if said else "it gave no answer"


def _plain(value: Any) -> Any:
    """Return a value of either engine as Python has it; nothing where there is none."""
    if value is None or type(value).__name__ in _NOTHING or value != value:  # noqa: PLR0124 - not a number
        return None
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)  # Spark's are in UTC, and do not say so
    return value.item() if hasattr(value, "item") else value
