"""What the site needs beside MkDocs: pages of files outside of docs/, and docstrings as Markdown.

Documents link to tutorials, benchmarks and the README as files of the repository, so that links
work wherever the repository is read. On the site these files are pages, and links lead there.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import DocstringSectionParameters, ExprName, Extension, Function, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "licence.md",
    "CITATION.cff": "citation.md",
    **{
        f"{folder}/{path.name}": f"{folder.removeprefix('docs/')}/{path.stem}.md"
        for folder in ("benchmarks", "docs/pictures", "tutorials")
        for path in sorted((REPOSITORY / folder).glob("*.py"))
    },
}
"""Programs and files outside of docs/, and the pages that are made of them."""

SOURCES = {page: source for source, page in PAGES.items()}

NAMES = {
    name.rpartition(".")[2]: name
    for path in sorted((REPOSITORY / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
}
"""What the reference explains, by short and by full name."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=page_of(source)))
    return files


def page_of(source: str) -> str:
    """The Markdown of one file: itself, or a program with its first line above it."""
    text = (REPOSITORY / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    name = posixpath.basename(source)
    if source.endswith(".py"):
        summary = re.match(r'"""(.*?)(?:"""|\n\n)', text, flags=re.DOTALL)
        about = summary[1] if summary else ""
        return (
            "---\nsearch:\n  boost: 0.5\n---\n"  # what explains a name is found before what uses it
            f"# {name}\n\n{about}\n\n```console\npython {source}\n```\n\n```python\n{text}```\n"
        )
    return f"# {name}\n\n```text\n{text}```\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to the pages that these are on the site."""
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")

    def lead(link: re.Match[str]) -> str:
        written, mark, anchor = link["target"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), written))
        target = PAGES.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return link[0]  # MkDocs reports it
        before = link["before"]
        if before == f"[{written}](" and path.endswith(".md"):
            before = f"[{title_of(path)}]("  # a site has pages, not files
        relative = posixpath.relpath(target, posixpath.dirname(place) or ".")
        return f"{before}{relative}{mark}{anchor}{link['after']}"

    before, after = r'(?P<before>\[[^\[\]\n]*\]\(|src=")', r'(?P<after>[)"])'
    markdown = re.sub(rf'{before}(?P<target>[^)"#:]+(#[^)"]*)?){after}', lead, markdown)
    return markdown if place.startswith("api/") else with_names_linked(markdown)


def title_of(path: str) -> str:
    """The heading of a document of the repository."""
    heading = re.search(r"^# (.+)$", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else path


def with_names_linked(markdown: str) -> str:
    """Let the first mention of each public name lead to the reference."""
    names = dict(NAMES)

    def lead(mention: re.Match[str]) -> str:
        name = names.pop(mention[1], None)
        return f"[{mention[0]}][{name}]" if name else mention[0]

    lines, is_code = markdown.split("\n"), False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.startswith("#"):
            lines[number] = re.sub(r"(?<![\[`])`(\w+)`(?![\]`])", lead, line)
    return "\n".join(lines)


class DocstringsAsMarkdown(Extension):
    """Reads what docstrings take from reStructuredText: ``Example:`` sections and ``::`` blocks."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """A docstring with ``Examples:`` as its section, and fences around its literal blocks."""
    lines, result = docstring.splitlines(), []
    while lines:
        line = lines.pop(0)
        indent = len(line) - len(line.lstrip())
        is_literal = line.endswith("::")
        is_example = line.strip() in ("Example:", "Example::")
        if not (is_literal or is_example):
            # Powers are not bold, unless they are code already.
            parts = line.split("``")
            parts[::2] = [re.sub(r"(?<=\w)\*\*(?=\w)", r"\\*\\*", part) for part in parts[::2]]
            result.append("``".join(parts))
            continue
        block = []
        while lines and (not lines[0].strip() or len(lines[0]) - len(lines[0].lstrip()) > indent):
            block.append(lines.pop(0))
        while block and not block[0].strip():
            block.pop(0)
        after = []
        while block and not block[-1].strip():
            after.append(block.pop())
        if is_example:
            result.append(f"{' ' * indent}Examples:")
        elif line.strip() != "::":
            result += [line[:-1], ""]
        if is_literal:
            depth = min((len(each) - len(each.lstrip()) for each in block if each), default=0)
            margin = " " * (depth if is_example else indent)
            code = [f"{margin}{each[depth:]}".rstrip() for each in block]
            language = "python" if is_python("\n".join(each[depth:] for each in block)) else "text"
            block = [f"{margin}```{language}", *code, f"{margin}```"]
        result += block + after
    return "\n".join(result)


def is_python(text: str) -> bool:
    """Whether a literal block is a program or a session, and not a table, say."""
    try:
        ast.parse(text)
    except SyntaxError:
        return ">>> " in text
    return True


class DefaultsAsValues(Extension):
    """Shows defaults as their values: neither names of constants, nor the dots of unpacked ones."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Rewrite the defaults of one function, in its signature and in its docstring."""
        values = {}
        for parameter in func.parameters:
            constant = None
            if parameter.default == "...":
                constant = f"{POLICY}.{parameter.name}"
            elif isinstance(parameter.default, ExprName):
                constant = parameter.default.canonical_path
            if constant and (value := value_of(func, constant)):
                parameter.default = values[parameter.name] = value
        for section in func.docstring.parsed if func.docstring and values else ():
            if isinstance(section, DocstringSectionParameters):
                for described in section.value:
                    described.value = values.get(described.name, described.value)
        if func.name == "__init__" and func.docstring and not func.docstring.value:
            func.docstring = None  # made by unpacking: the class explains the same arguments


POLICY = "rlpool.workers.failure_policy.FailurePolicy"
"""Where the defaults of the arguments are that many classes share."""


def value_of(function: Function, constant: str) -> str | None:
    """What a constant of rlpool is, as it is written; None if it is not known."""
    try:
        value = function.modules_collection[constant].value
    except (AttributeError, KeyError):
        return None
    if isinstance(value, ExprName):
        return value_of(function, value.canonical_path)
    return value if value is None else str(value)
