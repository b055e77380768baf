# (Tensor x, int[] sizes=[1, 2], *, float[] more=[3.]) -> Tensor

# Autograd
def autograd(_keyset, /, x, *_rest, **_named):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        if not (x.requires_grad and _is_grad_enabled()):
            return _current.direct(x, *_rest, **_named)
    return _general(_keyset, _current, (x, *_rest), _named)

# CompositeExplicitAutograd
def kernel(x, sizes=_default_1, *, more=_default_2):
    if sizes is _default_1:
        sizes = _list(sizes)
    if more is _default_2:
        more = _list(more)
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, sizes, more=more)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, sizes, more=more)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, sizes, more=more)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x,), (_result,)):
        raise _alias_error(_result, _fn, (x, sizes), {'more': more})
    return _result
