# (Tensor x, *, Tensor? y=None) -> Tensor

# Autograd
def autograd(_keyset, /, x, **_named):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (_any_requires_grad(x, **_named) and _is_grad_enabled()):
            return _current.direct(x, **_named)
    return _general(_keyset, _current, (x,), _named)

# CompositeExplicitAutograd
def kernel(x, *, y=_default_1):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y=y)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y=y)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y=y)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
            or _result is y
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, y), (_result,)):
        raise _alias_error(_result, _fn, (x,), {'y': y})
    return _result
