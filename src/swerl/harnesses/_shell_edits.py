"""Edits as shell commands, for the scripts of agents whose only tool is a shell."""

from __future__ import annotations

import shlex

from swerl.core.patch import FileEdit

_PYTHON = (
    "import sys; path, old, new = sys.argv[1:]; text = open(path, newline='').read(); "
    "open(path, 'w', newline='').write(text.replace(old, new, 1))"
)
_PERL = (
    "my ($path, $old, $new) = @ARGV; local $/; open(F, '<', $path); my $text = <F>; "
    "$text =~ s/\\Q$old\\E/$new/; open(F, '>', $path); print F $text"
)


def edit_command(edit: FileEdit, workdir: str) -> str:
    """Return one command that makes this edit, with the Python or the Perl of the image."""
    path = shlex.quote(f"{workdir}/{edit.path}")
    if not edit.old:  # a new file, or an empty one
        return f'mkdir -p "$(dirname {path})" && printf %s {shlex.quote(edit.new)} > {path}'
    values = f"{path} {shlex.quote(edit.old)} {shlex.quote(edit.new)}"
    python = f"python3 -c {shlex.quote(_PYTHON)} {values}"
    perl = f"perl -e {shlex.quote(_PERL)} -- {values}"
    return f"if command -v python3 >/dev/null; then {python}; else {perl}; fi"
