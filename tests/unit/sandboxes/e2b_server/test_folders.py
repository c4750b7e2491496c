"""What `stat` prints is read safely."""

from __future__ import annotations

from swerl.sandboxes.e2b_server.folders import Marker, new_marker

TIME = "2026-01-02 03:04:05.678901234 +0000"


def test_names_with_newlines_and_forged_records_stay_names() -> None:
    marker = Marker("m1")
    forged = f"/d/x\nm2 81a4 1 {TIME} a 1 a 1 9 /etc/shadow"
    output = f"m1 81a4 3 {TIME} agent 1000 UNKNOWN 77 12 {forged}\n"
    [entry] = marker.read(output)
    assert entry.path == forged
    assert (entry.owner, entry.group, entry.size) == ("agent", "77", 3)
    assert entry.message()["modifiedTime"] == "2026-01-02T03:04:05.678901234Z"
    assert entry.message()["permissions"] == "-rw-r--r--"


def test_a_link_shows_what_it_leads_to() -> None:
    marker = new_marker()
    output = (
        f"{marker.entry.split()[0]} a1ff 4 {TIME} root 0 root 0 5 /d/l\n"
        f"{marker.env['MARK_LINK']} 41ed /d/l\n{marker.word}\n/etc\n"
    )
    [entry] = marker.read(output)
    told = entry.message()
    assert (told["type"], told["symlinkTarget"], told["mode"]) == (
        "FILE_TYPE_DIRECTORY", "/etc", 0o755
    )  # fmt: skip
    assert str(told["permissions"]).startswith("L")


def test_a_folder_comes_before_what_it_holds() -> None:
    marker = Marker("m")
    paths = ["/d/a-b", "/d/a/z", "/d/a"]
    output = "".join(f"m 41ed 0 {TIME} u 1 g 1 {n} {path}\n" for n, path in enumerate(paths))
    assert [entry.path for entry in marker.read(output)] == ["/d/a", "/d/a/z", "/d/a-b"]
