import inspect

import stepcache as sc

PROMISED = [
    "step",
    "Session",
    "current_session",
    "no_recompile",
    "ProgramCache",
    "Rules",
]


def test_promised_names_are_there():
    assert set(PROMISED) <= set(sc.__all__)


def test_all_is_what_is_there():
    names = [name for name in dir(sc) if not name.startswith("_")]
    public = {name for name in names if not inspect.ismodule(getattr(sc, name))}
    assert public - {"load_ipython_extension"} == set(sc.__all__)
    assert list(sc.__all__) == sorted(sc.__all__)


def test_public_names_are_documented():
    for name in sc.__all__:
        value = getattr(sc, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for member, function in inspect.getmembers(value, inspect.isfunction):
                if not member.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{member}"


def test_errors_form_one_tree():
    for name in sc.__all__:
        value = getattr(sc, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            tree = sc.StepCacheWarning if issubclass(value, Warning) else sc.StepCacheError
            assert issubclass(value, tree), name
