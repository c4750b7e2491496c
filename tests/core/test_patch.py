from swerl.core.patch import FileEdit, edits, touched

PATCH = """diff --git a/pkg/a.py b/pkg/a.py
index 111..222 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@ def f():
 one
-two
+TWO
 three
@@ -10,2 +10,3 @@
 ten

+eleven
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1,2 @@
+hello
+world
diff --git a/old.py b/moved.py
similarity index 100%
rename from old.py
rename to moved.py
"""


def test_each_hunk_is_one_edit_with_its_context() -> None:
    assert edits(PATCH) == [
        FileEdit("pkg/a.py", "one\ntwo\nthree\n", "one\nTWO\nthree\n"),
        FileEdit("pkg/a.py", "ten\n\n", "ten\n\neleven\n"),
        FileEdit("new.txt", "", "hello\nworld\n"),
    ]


def test_touched_names_both_sides_of_a_rename() -> None:
    assert touched(PATCH) == ("pkg/a.py", "new.txt", "old.py", "moved.py")


def test_a_line_that_looks_like_a_header_inside_a_hunk_is_content() -> None:
    patch = "--- a/x\n+++ b/x\n@@ -1,1 +1,2 @@\n--- a\n+++ b/y\n+++ b/z\n"
    assert edits(patch) == [FileEdit("x", "-- a\n", "++ b/y\n++ b/z\n")]


def test_a_file_may_end_without_a_newline_on_either_side() -> None:
    marker = "\\ No newline at end of file\n"
    patch = f"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n one\n-two\n{marker}+TWO\n"
    assert edits(patch) == [FileEdit("x", "one\ntwo", "one\nTWO\n")]
    patch = f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-one\n+ONE\n{marker}"
    patch += "--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n"
    assert edits(patch) == [FileEdit("x", "one\n", "ONE"), FileEdit("y", "a\n", "b\n")]


def test_a_deleted_file_is_emptied_under_its_own_name() -> None:
    patch = "--- a/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-one\n"
    assert edits(patch) == [FileEdit("x", "one\n", "")]
