"""Where prompts come from: local files, the Hugging Face Hub, remote stores; raw rows to conversations."""

from collections.abc import Callable, Iterator, Sequence

from scripts.lib.config.model import Dataset
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.files import is_local, local_file, local_paths
from scripts.lib.prompts.sources.formats import Conversation, to_conversation
from scripts.lib.prompts.sources.presets import Plan, plan_of
from scripts.lib.prompts.sources.reading import SourceFile
from scripts.lib.prompts.sources.rows import Row, read_file


def local_files(name: str, dataset: Dataset) -> list[str]:
    """Files of this machine that the dataset `name` is made of; remote ones are not among them.

    For the workflow, which remakes prompts when they change. Touches no network. Raises UserError that names the
    key, for a file that is missing or a preset that doesn't exist.
    """
    plan = plan_of(name, dataset)
    where = f"datasets.{name}.source"
    return [path for source in plan.sources if is_local(source) for path in local_paths(source, where)]


def evaluation_files(paths: list[str]) -> list[str]:
    """Files of this machine that `selection.decontaminate` names. Raises UserError for one that is missing."""
    return [file for path in paths if is_local(path) for file in local_paths(path, "selection.decontaminate")]


def source_files(name: str, dataset: Dataset) -> list[SourceFile]:
    """All files of the dataset `name`, in the order in which they are read. Raises UserError."""
    plan = plan_of(name, dataset)
    where = f"datasets.{name}.source"
    files: list[SourceFile] = []
    for source in plan.sources:
        if is_local(source):
            files += [local_file(path) for path in local_paths(source, where)]
        elif source.startswith("hf:"):
            from scripts.lib.prompts.sources.hub import hub_files

            files += hub_files(source, plan, where)
        else:
            from scripts.lib.prompts.sources.remote import remote_files

            files += remote_files(source, where)
    return files


def read_rows(files: Sequence[SourceFile], opening: Callable[[SourceFile], None] = lambda file: None) -> Iterator[Row]:
    """Raw rows of all files, one in memory at a time; `opening` hears of each file before it is opened.

    Raises UserError when a file can't be read on, or was changed meanwhile.
    """
    for file in files:
        opening(file)
        yield from read_file(file.name, file.open)
        file.describe()


def conversation_of(row: Row, plan: Plan) -> Conversation:
    """The conversation of a raw row. Raises Defect."""
    if row.defect is not None:
        raise row.defect
    value = row.value
    if isinstance(value, dict):
        for column, wanted in plan.keep.items():
            if value.get(column) is not None and value[column] not in wanted:
                raise Defect("filtered", f"{column} is {value[column]!r}"[:100])
        if plan.ignored_columns:
            value = {name: cell for name, cell in value.items() if name not in plan.ignored_columns}
    return to_conversation(value, plan.format, plan.fields, plan.answers)
