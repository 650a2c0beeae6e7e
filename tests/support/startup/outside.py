"""Note every access to a file outside the folders that tests may access.

The environment names these folders, so the rule holds in every Python that a test starts. To open a
file, to list a folder and to ask whether something exists are accesses. Nothing is refused, because
a program may catch the error; ``support.hermetic`` reads the notes, and fails the test. What
libraries open without Python, such as a shared library, is not noticed.
"""

import os
import sys

NOTES, ROOTS = "PACELINE_TEST_NOTES", "PACELINE_TEST_ROOTS"
"""The variables that name the file of notes, and the folders that may be accessed."""
_ACCESSES = ("open", "os.listdir", "os.scandir")
_HARMLESS = ("ldconfig",)
"""Programs that libraries start with an environment of their own; they start no Python."""
_noted = set()
_roots, _parents, _watching = (), frozenset(), False


def watch():
    """Watch this process and its forks, if the environment asks for it."""
    global _roots, _parents, _watching
    if NOTES not in os.environ:
        return
    folders = [os.path.abspath(folder) for folder in os.environ[ROOTS].split(os.pathsep)]
    folders += [os.path.realpath(folder) for folder in folders]
    _roots = tuple(f"{folder}/" for folder in dict.fromkeys(folders))
    _parents = frozenset(above for folder in folders for above in _with_parents(folder))
    if not _watching:
        _watching = True
        sys.addaudithook(_on_event)
        os.stat, os.access = _watched(os.stat), _watched(os.access)


def _with_parents(folder):
    """A folder and all its parents, through which every path leads."""
    while folder != "/":
        yield folder
        folder = os.path.dirname(folder)
    yield folder


def _on_event(event, arguments):
    if event in _ACCESSES:
        _check(arguments[0])
    elif event == "subprocess.Popen":
        program, command, _, environment = arguments
        bare = environment is not None and NOTES not in environment
        if bare and os.path.basename(os.fsdecode(program)) not in _HARMLESS:
            _note(f"{command} is started with an environment that lacks {NOTES}")


def _watched(call):
    """A function of ``os`` that checks its path first: it raises no audit event."""

    def watched(path, *args, **kwargs):
        _check(path)
        return call(path, *args, **kwargs)

    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if call in able:
            able.add(watched)
    return watched


def _check(path):
    try:
        path = os.fsdecode(path)
    except TypeError:
        return  # a file descriptor: its file was checked when it was opened
    if path.startswith(_roots) and "/.." not in path:
        return
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        return  # relative to a folder that no longer exists
    if not _is_inside(path) and not _is_inside(os.path.realpath(path)):
        _note(path)


def _is_inside(path):
    return path in _parents or path.startswith(_roots)


def _note(what):
    where = _caller()
    if (what, where) in _noted:
        return
    _noted.add((what, where))
    text = f"{what}, by {where} in {' '.join(sys.orig_argv[:4])[:200]!r}\n"
    try:
        notes = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):
        return  # the tests have ended
    os.write(notes, text.encode(errors="replace"))
    os.close(notes)


def _caller():
    """The innermost line outside this file and the standard library."""
    frame = sys._getframe(1)
    library = os.path.dirname(os.__file__) + "/"
    while frame is not None:
        name = frame.f_code.co_filename
        own = name == __file__ or name.startswith("<frozen")
        if not own and (not name.startswith(library) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the standard library"
