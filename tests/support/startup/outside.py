"""Take a note of every look at a file outside of what the tests may look at.

The environment says where that is, so it holds in every Python that a test starts. A look is to
open a file, to list a folder, or to ask whether something is there. Nothing is refused, for a
program may well catch that; ``support.hermetic`` reads the notes, and fails the test. What
libraries open without Python's knowledge, such as a shared library, is not seen.
"""

import os
import sys

NOTES, ROOTS = "PACELINE_TEST_NOTES", "PACELINE_TEST_ROOTS"
"""Variables with the file for notes, and the folders that may be looked at."""
_LOOKS = ("open", "os.listdir", "os.scandir")
_HARMLESS = ("ldconfig",)
"""Programs that libraries start with an environment of their own, and that start no Python."""
_noted = set()
_roots, _around, _watching = (), frozenset(), False


def watch():
    """Watch over this process and its forks, if the environment says so."""
    global _roots, _around, _watching
    if NOTES not in os.environ:
        return
    folders = [os.path.abspath(folder) for folder in os.environ[ROOTS].split(os.pathsep)]
    folders += [os.path.realpath(folder) for folder in folders]
    _roots = tuple(f"{folder}/" for folder in dict.fromkeys(folders))
    _around = frozenset(above for folder in folders for above in _and_above(folder))
    if not _watching:
        _watching = True
        sys.addaudithook(_on_event)
        os.stat, os.access = _watched(os.stat), _watched(os.access)


def _and_above(folder):
    """A folder and those that it lies in, which everybody walks through."""
    while folder != "/":
        yield folder
        folder = os.path.dirname(folder)
    yield folder


def _on_event(event, arguments):
    if event in _LOOKS:
        _look(arguments[0])
    elif event == "subprocess.Popen":
        program, command, _, environment = arguments
        bare = environment is not None and NOTES not in environment
        if bare and os.path.basename(os.fsdecode(program)) not in _HARMLESS:
            _note(f"{command} is started with an environment that lacks {NOTES}")


def _watched(call):
    """A function of ``os`` whose first argument is a path; it has no event of its own."""

    def watched(path, *args, **kwargs):
        _look(path)
        return call(path, *args, **kwargs)

    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if call in able:
            able.add(watched)
    return watched


def _look(path):
    try:
        path = os.fsdecode(path)
    except TypeError:
        return  # a descriptor, which was opened before
    if path.startswith(_roots) and "/.." not in path:
        return
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        return  # relative to a folder that is gone
    if not _is_inside(path) and not _is_inside(os.path.realpath(path)):
        _note(path)


def _is_inside(path):
    return path in _around or path.startswith(_roots)


def _note(what):
    where = _caller()
    if (what, where) in _noted:
        return
    _noted.add((what, where))
    text = f"{what}, by {where} in {' '.join(sys.orig_argv[:4])[:200]!r}\n"
    try:
        notes = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):
        return  # the tests are over
    os.write(notes, text.encode(errors="replace"))
    os.close(notes)


def _caller():
    """The innermost line that belongs neither to this file nor to the standard library."""
    frame = sys._getframe(1)
    library = os.path.dirname(os.__file__) + "/"
    while frame is not None:
        name = frame.f_code.co_filename
        own = name == __file__ or name.startswith("<frozen")
        if not own and (not name.startswith(library) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the standard library"
