# (Tensor x, Tensor y, float by) -> Tensor
# setup_context

# Autograd
def autograd(_keyset, /, x, y, by):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and ((x is not None and x.requires_grad) or (y is not None and y.requires_grad))):
            _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, y, by)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, y, by)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, y, by)
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
                raise _alias_error(_result, _fn, (x, y, by), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, y, by)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, y, by), {})

# CompositeExplicitAutograd
def kernel(x, y, by):
    _fn = _current.fn if not _profiler._is_profiler_enabled else _current.named()
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, y, by)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, y, by)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, y, by)
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
        raise _alias_error(_result, _fn, (x, y, by), {})
    return _result

# Autograd, forward
def forward(_ctx, _kernel, x, y, by):
    _result = _kernel(x, y, by)
    _kept = _ctx.__dict__
    if _type(_kernel) is _partial and _transforms_active() or _autocast_is_on():
        _set_up(_ctx, (x, y, by), {}, _result)
    else:
        _callback(ctx=_ctx, inputs=(x, y, by), output=_result)
    _untracked = _ctx.non_differentiable
    for _value in _kept.values():
        if _type(_value) not in _no_tensors:
            _untracked = True
    for _saved in _ctx.to_save or ():
        if _saved is not x and _saved is not y and _saved is not _result:
            _untracked = True
    if _untracked:
        _record_untracked(_ctx, (x, y, by), (*(x, y, by), _result))
    if _ctx.to_save and _saved_tensors_hooks(True) is not None:
        _ctx._customops_hooked = True
    if '_customops_materialize' in _kept:
        _finish(_ctx, (x, y, by), (_result,))
    __, _needs_x, _needs_y, __, = _ctx._customops_raw_flags
    _like = _metadata if _type(_kernel) is _partial else _facts
    _ctx._customops_expected = (_like(x) if _needs_x else None, _like(y) if _needs_y else None, None)
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
    if _type(_result) is _tuple and _len(_result) == 3:
        _grad_x, _grad_y, _grad_by, = _result
        _like_x, _like_y, _like_by, = _likes
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and ((_like_y is None or _like_y == (_grad_y.shape, _grad_y.dtype, _grad_y.device)) if _isinstance(_grad_y, _Tensor) else _grad_y is _like_y) and _grad_by is None:
            return None, _grad_x, _grad_y, _grad_by
    _none_allowed = _any(grad is None for grad in _grads)
    return None, *_check(_result, _likes, none_allowed=_none_allowed)
