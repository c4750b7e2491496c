"""Measure the shape of the code: rooms, lines, names, cycles, English, docs, start-up time.

    python bench/house.py            every measure, with a traced rollout
    python bench/house.py --static   only the measures of the sources

Prints two tables and writes house.json. `tests/test_house.py` checks the static measures. What is
added pays with what it deletes: raising a bound needs a sentence beside it that names the deletion.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "swerl"
DOCS = ROOT / "docs"
LANGUAGES = (".py", ".sh", ".js", ".css", ".html", ".c", ".pl", ".mjs")
"""Suffixes of the files whose lines count."""
UNBOUNDED_SHELVES = ("reference", "measurements")
"""Shelves with generated or dated pages; the pages of the others are written for readers."""
SMALL_LINES = 70
LONG_FILE_LINES = 800
# fmt: off
VAGUE_NAMES = {
    "each", "found", "done", "known", "own", "kept", "wanted", "named", "seen",
    "made", "given", "one", "left", "told", "held", "used", "taken", "plain",
}
# fmt: on
"""Names of variables and parameters that say nothing about the value."""

BOUNDS = {
    "rooms": 17,
    "root modules": 2,
    "files": 326,
    "lines": 69_540,
    "lines of tests": 55_720,
    "lines of bench": 4_300,  # twin and the floor of a turn, paid for by 1,500 lines of tests
    "names that fit everything": 205,
    "commands": 34,  # `reward`: a researcher tries a reward in seconds
    "recipe keys": 167,
    "files executed by one episode": 70,
    "modules imported by one episode": 200,
    "small modules with one importer": 15,
    "class names in several modules": 15,
    "room cycles": 0,
    "module cycles": 0,
    "longest function": 60,
    "long files": 0,
    "where per 1,000 words": 0.5,
    "docstrings that begin with What": 5,
    "most options of a command": 11,  # `tasks from-repo --mutate`
    "pages for readers": 36,
    "pages not in the index": 0,
    "words of guides": 14_000,
    "words of design": 11_000,
    "words of measurements": 8_000,
    "swerl --help, s": 0.2,
    "swerl rollout, s": 0.8,
}
"""Measure -> its upper bound."""
MEASURED_BY_RUNNING = {
    "files executed by one episode", "modules imported by one episode",
    "swerl --help, s", "swerl rollout, s",
}  # fmt: skip
"""The measures that `static` leaves out."""

ROOM_BOUNDS = {
    "core": 4_120,
    "recipe": 1_180,
    "tasks": 3_320,
    "images": 3_750,
    "sandboxes": 9_840,
    "harnesses": 2_500,
    "engines": 6_710,
    "gateway": 3_770,
    "grading": 3_660,
    "runs": 3_280,
    "cluster": 1_570,
    "plan": 2_440,
    "rollout": 2_930,
    "training": 10_130,
    "checks": 2_860,
    "view": 1_940,
    "cli": 5_630,
}
"""Room -> the most lines of all languages in it. `swerl reward` and uploads to the hub, in rollout,
cli, tasks and recipe, are paid for by images and by the keys of recipes that left. vLLM, in engines
and its tests, is paid for by what it shares with SGLang: its launcher, pool and settings.
`tasks vet --discover`, in checks and cli, is paid for by a schedule and keys that left. Nothing
went for the choice of test files by `tasks from-repo`, in grading and cli. The search of the
repository for expected values, in grading, is paid for by view and gateway."""


def sources() -> dict[str, Path]:
    """Return every module of swerl by its dotted name below `swerl`."""
    modules = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            modules[name] = path
    return modules


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return every node of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def num_lines(folder: Path) -> int:
    """Return the number of lines of all languages below a folder."""
    files = [path for path in folder.rglob("*") if path.suffix in LANGUAGES and path.is_file()]
    return sum(len(path.read_text().splitlines()) for path in files)


def room_lines() -> dict[str, int]:
    """Return room -> its number of lines of all languages."""
    return {room: num_lines(SRC / room) for room in ROOM_BOUNDS}


def imports(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return module -> modules of swerl that it imports anywhere in its code."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in nodes(path):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                base = node.module.removeprefix("swerl").lstrip(".")
                if node.module.split(".")[0] == "swerl":
                    for alias in node.names:
                        full = f"{base}.{alias.name}".lstrip(".")
                        targets.append(full if full in modules else base)
            elif isinstance(node, ast.Import):
                targets += [alias.name.removeprefix("swerl.") for alias in node.names]
            graph[name] |= {target for target in targets if target in modules and target != name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two nodes or more (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def docstrings() -> Iterator[tuple[Path, str]]:
    """Yield every docstring and every text below a field in the sources."""
    for path in sources().values():
        for node in nodes(path):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield path, value.value


def vague_names() -> Counter[str]:
    """Return file -> its number of bindings of names that fit everything."""
    bindings: Counter[str] = Counter()
    for path in sources().values():
        for node in nodes(path):
            is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_variable else getattr(node, "arg", None)
            if name in VAGUE_NAMES and (is_variable or isinstance(node, ast.arg)):
                bindings[str(path.relative_to(ROOT))] += 1
    return bindings


def repeated_class_names() -> dict[str, list[str]]:
    """Return class name -> its modules if there are several; `Options` is a convention."""
    modules = defaultdict(list)
    for name, path in sources().items():
        for node in getattr(nodes(path)[0], "body", ()):
            if isinstance(node, ast.ClassDef) and node.name != "Options":
                modules[node.name].append(name)
    return {name: owners for name, owners in sorted(modules.items()) if len(owners) > 1}


def small_modules() -> list[str]:
    """Return the modules of fewer than 70 lines that exactly one other module imports."""
    modules = sources()
    users = Counter(target for targets in imports(modules).values() for target in targets)
    return [
        name
        for name, path in modules.items()
        if path.name != "__init__.py"
        and len(path.read_text().splitlines()) < SMALL_LINES
        and users[name] == 1
    ]


def long_files() -> list[str]:
    """Return the modules that are longer than one idea is."""
    modules = sources().items()
    return [name for name, path in modules if len(path.read_text().splitlines()) > LONG_FILE_LINES]


def functions() -> Iterator[tuple[int, Path, str]]:
    """Yield lines, file and name of every function."""
    for path in sources().values():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, path, node.name


def pages() -> list[Path]:
    """Return the written pages of docs/."""
    every = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md"))]
    return [page for page in every if page.parts[0] not in UNBOUNDED_SHELVES]


def pages_not_in_the_index() -> list[str]:
    """Return the pages that docs/README.md does not link."""
    index = DOCS / "README.md"
    text = index.read_text() if index.exists() else ""
    linked = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)}
    every = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
    return [page for page in every if page not in linked and page != "README.md"]


def num_words(shelf: str) -> int:
    """Return the number of words of the pages on a shelf of docs/."""
    return sum(len(page.read_text().split()) for page in (DOCS / shelf).glob("*.md"))


def commands() -> dict[str, int]:
    """Return the path of each command -> its number of options."""
    import click

    from swerl.cli.main import whole_command

    leaves, todo = {}, [("swerl", whole_command())]
    while todo:
        path, command = todo.pop()
        children = getattr(command, "commands", {})
        todo += [(f"{path} {name}", child) for name, child in children.items()]
        if children and not getattr(command, "invoke_without_command", False):
            continue
        options = [p for p in command.params if isinstance(p, click.Option) or hasattr(p, "opts")]
        leaves[path] = sum(p.param_type_name == "option" and p.name != "help" for p in options)
    return leaves


def recipe_keys() -> list[str]:
    """Return the keys of recipes that the reference pages list, those of plug-ins included."""
    rows = [
        line.split("`")[1]
        for page in sorted((DOCS / "reference").glob("recipe*.md"))
        for line in page.read_text().splitlines()
        if line.startswith("| `")
    ]
    return sorted(rows)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def static() -> dict[str, float]:
    """Return the measures of the sources."""
    modules = sources()
    graph = imports(modules)
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        rooms[name.split(".")[0]] |= {target.split(".")[0] for target in targets}
    for room in rooms:
        rooms[room] = {other for other in rooms[room] if other != room}
    texts = [text for _, text in docstrings()]
    prose = [*texts, *(page.read_text() for page in (DOCS / page for page in pages()))]
    counted = Counter(word for text in prose for word in words(text))
    folders = [path for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"]
    options = commands()
    return {
        "rooms": len(folders),
        "root modules": len(list(SRC.glob("*.py"))),
        "files": len(list(SRC.rglob("*.py"))),
        "lines": num_lines(SRC),
        "lines of tests": num_lines(ROOT / "tests"),
        "lines of bench": num_lines(ROOT / "bench"),
        "names that fit everything": vague_names().total(),
        "commands": len(options),
        "recipe keys": len(recipe_keys()),
        "small modules with one importer": len(small_modules()),
        "class names in several modules": len(repeated_class_names()),
        "room cycles": len(cycles(rooms)),
        "module cycles": len(cycles(graph)),
        "longest function": max(size for size, *_ in functions()),
        "long files": len(long_files()),
        "where per 1,000 words": round(1000 * counted["where"] / counted.total(), 2),
        "docstrings that begin with What": sum(text.lstrip().startswith("What") for text in texts),
        "most options of a command": max(options.values()),
        "pages for readers": len(pages()),
        "pages not in the index": len(pages_not_in_the_index()),
        "words of guides": num_words("guides"),
        "words of design": num_words("design"),
        "words of measurements": num_words("measurements"),
    }


TRACER = """
import json, os, sys, threading
seen = set()
def look(frame, event, _):
    code = frame.f_code
    is_function = code.co_flags & 0x2 and code.co_name != "<module>"
    if event == "call" and is_function and {src!r} in code.co_filename:
        seen.add(code.co_filename)
pid = os.getpid()
threading.setprofile(look)
sys.setprofile(look)
sys.argv = ["swerl", *{argv!r}]
from swerl.__main__ import main
try:
    main()
except SystemExit:
    pass
if os.getpid() == pid:
    loaded = [name for name in sys.modules if name.split(".")[0] == "swerl"]
    open({out!r}, "w").write(json.dumps([sorted(seen), sorted(loaded)]))
"""
ROLLOUT = ["rollout", "--engine", "scripted:gold"]


def traced(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files that a rollout executes in its controller, and its imported modules."""
    out = folder / "trace.json"
    code = TRACER.format(src=str(SRC), argv=ROLLOUT, out=str(out))
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    files, modules = json.loads(out.read_text())
    return files, modules


def seconds(arguments: list[str], folder: Path, *, times: int = 5) -> float:
    """Return the median wall time of a command in a new process."""
    times_s = []
    for _ in range(times):
        started = time.perf_counter()
        command = [sys.executable, "-m", "swerl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        times_s.append(time.perf_counter() - started)
    return round(statistics.median(times_s), 2)


def main() -> None:
    """Print the tables and write house.json."""
    measures = static()
    if "--static" not in sys.argv:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            seconds(ROLLOUT, folder, times=1)
            files, modules = traced(folder)
            measures["files executed by one episode"] = len(files)
            measures["modules imported by one episode"] = len(modules)
            measures["swerl --help, s"] = seconds(["--help"], folder)
            measures["swerl rollout, s"] = seconds(ROLLOUT, folder)
    rooms = room_lines()
    _print_table(measures, BOUNDS)
    print()
    _print_table(rooms, ROOM_BOUNDS)
    Path("house.json").write_text(json.dumps(measures | {"rooms in lines": rooms}, indent=1) + "\n")


def _print_table(measures: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    for name, most in bounds.items():
        if name in measures:
            mark = "" if measures[name] <= most else "  <- over"
            print(f"{name:36} {measures[name]:>10,} {most:>10,}{mark}")


if __name__ == "__main__":
    main()
