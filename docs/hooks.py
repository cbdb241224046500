"""Hooks of MkDocs for the site: generated pages, and docstrings as Markdown.

Documents link to tutorials, benchmarks and the README as files, so that links also work in the
repository. On the site these files are pages, and links lead there. ``docs/api.md`` becomes an
index and one page per section.

For programs that read documentation, the site has two more files, following https://llmstxt.org:
``llms.txt`` lists the pages with a sentence each, ``llms-full.md`` contains all of them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from griffe import DocstringSectionParameters, ExprName, Extension, Function, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]

PAGES = {
    "README.md": "overview.md",
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
"""Programs and files outside docs/, and their pages."""

SOURCES = {page: source for source, page in PAGES.items()}

REFERENCE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")

NAMES = {
    name.rpartition(".")[2]: name
    for name in re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE)
}
"""Short and full names in the reference."""


def reference_pages() -> dict[str, str]:
    """Split ``docs/api.md`` into its introduction with a table of sections, and one page each.

    Returns:
        Markdown by path on the site. The section ``## Some words`` is ``api/some-words.md``; links
        to ``api.md#some-words`` lead there.
    """
    introduction, *sections = re.split(r"^## ", REFERENCE, flags=re.MULTILINE)
    pages, rows = {}, []
    for section in sections:
        title, about = re.match(r"(.*)\n\n(.*)\n", section).groups()
        name = title.lower().replace(" ", "-")
        pages[f"api/{name}.md"] = f"# {section}"
        rows.append(f"| [{title}](api.md#{name}) | {about} |\n")
    text, entry, rest = introduction.partition("::: ")
    table = "".join(["| section | contents |\n|---|---|\n", *rows])
    return {"api/index.md": f"{text}{table}\n{entry}{rest}", **pages}


REFERENCE_PAGES = reference_pages()

HIDDEN = re.compile(
    "|".join(
        re.findall(
            r'^ +- "!(\^.*)"$',
            (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
    )
)
"""Patterns of members that the reference omits."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the reference, and link to the repository if pyproject.toml has it."""
    config.nav = with_reference(config.nav)
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^urls = \{.*\bRepository = "([^"]+)"', project, flags=re.MULTILINE)
    if address:
        config.repo_url, config.repo_name = address[1], config.site_name
    return config


def with_reference(entries: list[Any]) -> list[Any]:
    """Replace ``api.md`` in the navigation by the pages of the reference."""
    found = []
    for entry in entries:
        if entry == "api.md":
            found += REFERENCE_PAGES
        elif isinstance(entry, dict):
            ((title, each),) = entry.items()
            is_page = isinstance(each, str) and each != "api.md"
            nested = each if is_page else with_reference(each if isinstance(each, list) else [each])
            found.append({title: nested})
        else:
            found.append(entry)
    return found


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    contents = {page: page_of(source) for source, page in PAGES.items()} | REFERENCE_PAGES
    for page, content in contents.items():
        files.append(File.generated(config, page, content=content))
    files.remove(files.get_file_from_path("api.md"))
    return files


def page_of(source: str) -> str:
    """Return the Markdown of a file: itself, or a program below its first line."""
    text = (REPOSITORY / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    name = posixpath.basename(source)
    if source.endswith(".py"):
        summary = re.match(r'"""(.*?)(?:"""|\n\n)', text, flags=re.DOTALL)
        about = summary[1] if summary else ""
        return (
            "---\nsearch:\n  boost: 0.5\n---\n"  # explanations are found before uses
            f"# {name}\n\n{about}\n\n```console\npython {source}\n```\n\n```python\n{text}```\n"
        )
    return f"# {name}\n\n```text\n{text}```\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository to their pages on the site."""
    place = page.file.src_uri

    def address_on_page(target: str) -> str:
        return posixpath.relpath(target, posixpath.dirname(place) or ".")

    TEXTS[place] = with_links(markdown, place, files, address_on_site)
    markdown = with_links(markdown, place, files, address_on_page)
    return markdown if place in REFERENCE_PAGES else with_names_linked(markdown)


def with_links(markdown: str, place: str, files: Files, address: Callable[[str], str]) -> str:
    """Point links to files of the repository to pages.

    Args:
        markdown: A page.
        place: Its path on the site.
        files: Files of the site.
        address: Returns the link to a page or image of the site.
    """
    source = "docs/api.md" if place in REFERENCE_PAGES else SOURCES.get(place, f"docs/{place}")

    def lead(link: re.Match[str]) -> str:
        written, mark, anchor = link["target"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), written))
        target = PAGES.get(path) or path.removeprefix("docs/")
        if target == "api.md":
            target, mark, anchor = f"api/{anchor or 'index'}.md", "", ""
        if files.get_file_from_path(target) is None:
            return link[0]  # MkDocs reports it
        before = link["before"]
        if before == f"[{written}](" and path.endswith(".md"):
            before = f"[{title_of(path)}]("  # a site has pages, not files
        return f"{before}{address(target)}{mark}{anchor}{link['after']}"

    before, after = r'(?P<before>\[[^\[\]\n]*\]\(|src=")', r'(?P<after>[)"])'
    return re.sub(rf'{before}(?P<target>[^)"#:]+(#[^)"]*)?){after}', lead, markdown)


def title_of(path: str) -> str:
    """Return the heading of a document of the repository."""
    heading = re.search(r"^# (.+)$", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else path


def with_names_linked(markdown: str) -> str:
    """Link the first mention of each public name to the reference."""
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


# Files for programs that read ---------------------------------------------------------------------

TEXTS: dict[str, str] = {}
"""Every page as Markdown, by path, with links from the root of the site."""

NAVIGATION: list[Navigation] = []
"""The navigation of the site being built, in a list."""


def address_on_site(target: str) -> str:
    """Return the path of a page or image from the root of the site."""
    return re.sub(r"\.md$", ".html", target)


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> None:
    """Record the pages and their order."""
    NAVIGATION[:] = [nav]


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write ``llms.txt`` and ``llms-full.md``."""
    site, (nav,) = Path(config.site_dir), NAVIGATION
    contents = {
        section.title: [page for page in nav.pages if section in page.ancestors]
        for section in nav.items
    }
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += ["All pages in one file: [llms-full.md](llms-full.md)", ""]
    for title, pages in contents.items():
        lines += [f"## {title}", "", *(line_about(page.file.src_uri) for page in pages), ""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    package = griffe.load("rlpool", search_paths=[REPOSITORY], docstring_parser="google")
    whole = [with_docstrings(TEXTS[page.file.src_uri], package) for page in nav.pages]
    (site / "llms-full.md").write_text("\n\n".join(whole), encoding="utf-8")


def line_about(place: str) -> str:
    """Return a link to a page with its first sentence."""
    text = re.sub(r"\A---\n.*?^---\n", "", TEXTS[place], flags=re.DOTALL | re.MULTILINE)
    title, _, rest = text.partition("\n")
    paragraphs = (part.replace("\n", " ").strip() for part in rest.split("\n\n"))
    first = next((p for p in paragraphs if re.match(r"(?!```)[\w`\[*]", p)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    sentence = re.split(r"(?<=[.:?!]) (?=[A-Z`])", plain)[0].rstrip(".:")
    return f"- [{title.removeprefix('# ')}]({address_on_site(place)}): {sentence}."


def with_docstrings(text: str, package: griffe.Module) -> str:
    """Insert signatures and docstrings into a page of the reference."""

    def described(entry: re.Match[str]) -> str:
        found = package[entry[1].removeprefix("rlpool.")] if "." in entry[1] else package
        members = entry[2].split(", ") if entry[2] else []
        parts = descriptions(found, entry[1], members)
        return "\n\n".join(parts)

    entry = r"^::: (\S+)$(?:\n    options:\n      members: \[(.*)\]$)?(?:\n +\S.*$)*"
    return re.sub(entry, described, text, flags=re.MULTILINE)


def descriptions(
    found: griffe.Object | griffe.Alias, name: str, members: list[str], level: int = 2
) -> Iterator[str]:
    """Describe an object and its members by name, signature and docstring.

    Args:
        found: The object.
        name: Its public name.
        members: Its members. If empty, all public methods of a class.
        level: Level of its heading.
    """
    if found.docstring is not None or level == 2:
        parts = [f"{'#' * level} {name}"]
        parts += [f"```python\n{found.signature()}\n```"] if found.is_function else []
        parts += [as_markdown(found.docstring.value)] if found.docstring is not None else []
        yield "\n\n".join(parts)
    if found.is_class and not members:
        methods = (each for each, value in found.all_members.items() if value.is_function)
        members = sorted(each for each in methods if not HIDDEN.search(each))
    for member in members:
        yield from descriptions(found[member], f"{name}.{member}", [], level + 1)


class DocstringsAsMarkdown(Extension):
    """Converts reStructuredText in docstrings: ``Example:`` sections and ``::`` blocks."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Rename ``Example:`` sections to ``Examples:``, and fence literal blocks."""
    lines, result = docstring.splitlines(), []
    while lines:
        line = lines.pop(0)
        indent = len(line) - len(line.lstrip())
        is_literal = line.endswith("::")
        is_example = line.strip() in ("Example:", "Example::")
        if not (is_literal or is_example):
            # Powers are not bold, unless they are already code.
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
    """Whether a literal block is a program or a session, rather than a table, for example."""
    try:
        ast.parse(text)
    except SyntaxError:
        return ">>> " in text
    return True


class DefaultsAsValues(Extension):
    """Shows defaults as values, not as names of constants or as dots of unpacked arguments."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Rewrite the defaults of a function in its signature and docstring."""
        values = {}
        for parameter in func.parameters:
            constant = None
            if parameter.default == "...":
                constant = f"{POLICY}.{parameter.name}"
            elif isinstance(parameter.default, ExprName):
                constant = parameter.default.canonical_path
            if constant and (value := value_of(func, constant)):
                parameter.default = values[parameter.name] = value
        for parameter in list(func.parameters):
            if parameter.default == "...":  # an alias
                del func.parameters[parameter.name]
        for section in func.docstring.parsed if func.docstring and values else ():
            if isinstance(section, DocstringSectionParameters):
                for described in section.value:
                    described.value = values.get(described.name, described.value)
        if func.name == "__init__" and func.docstring and not func.docstring.value:
            func.docstring = None  # made by unpacking: the class documents the same arguments


POLICY = "rlpool.workers.failure_policy.FailurePolicy"
"""Source of the defaults of arguments shared by many classes."""


def value_of(function: Function, constant: str) -> str | None:
    """Return the source text of a constant of rlpool; ``None`` if it is unknown."""
    try:
        value = function.modules_collection[constant].value
    except (AttributeError, KeyError):
        return None
    if isinstance(value, ExprName):
        return value_of(function, value.canonical_path)
    return value if value is None else str(value)
