# (Tensor x, int[] sizes=[1, 2], *, float[] more=[3.]) -> Tensor

# Autograd
def autograd(_keyset, /, x, sizes=_default_1, *, more=_default_2):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and x.requires_grad):
            if sizes is _default_1:
                sizes = _list(sizes)
            if more is _default_2:
                more = _list(more)
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, sizes, more=more)
            elif _records:
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
        _apply = _node.apply
        if _apply is not None:
            _named = {}
            if more is not _default_2:
                _named['more'] = more
            try:
                return _apply(_current.direct, x, *_without_defaults((sizes,), (_default_1,)), **_named)
            except _errors as _error:
                _node.explain(_error)
                raise
    _named = {}
    if more is not _default_2:
        _named['more'] = more
    return _general(_keyset, _current, (x, *_without_defaults((sizes,), (_default_1,))), _dict(**_named))

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

# Autograd, apply
def apply(_kernel, x, *_rest, **_named):
    _passed = 1 + _len(_rest)
    sizes, = (*_rest, None)[:1]
    _result = _function(_kernel, _named, _passed, x, sizes)
    return _result

# Autograd, forward
def forward(_ctx, _kernel, _named, _passed, x, sizes):
    _result = _kernel(*(x, (None if sizes is None else _list(sizes)))[:_passed], **_named)
    __, __, __, _needs_x, __, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None, _left_out if _passed <= 1 else None)
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _result

# Autograd, backward
def backward(_ctx, *_grads):
    _seen = _ctx
    if _ctx._customops_hooked:
        _seen = _unpacked_once(_ctx)
    if _ctx._customops_untracked is not None and _may_be_differentiated():
        _seen = _guarded(_ctx, _op)
    try:
        if _autocast_is_on():
            _result = _call_without_autocast(_fn, _seen, *_grads)
        else:
            _result = _fn(_seen, *_grads)
    except _AttributeError as _error:
        _ctx._customops_missing(_error)
        raise
    _likes = _ctx._customops_expected
    if _type(_result) is _tuple and _len(_result) == 2:
        _grad_x, _grad_sizes, = _result
        _like_x, _like_sizes, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and _grad_sizes is None:
            return None, None, None, _grad_x, _grad_sizes
    _none_allowed = _any(grad is None for grad in _grads)
    return None, None, None, *_check(_result, _likes, none_allowed=_none_allowed)
