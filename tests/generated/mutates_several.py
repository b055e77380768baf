# (Tensor(a!) x, Tensor(b!)[] ys) -> Tensor

# Autograd
def autograd(_keyset, /, x, ys):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _records = _is_grad_enabled()
        if not (_records and _any_requires_grad(x, ys)):
            _increment_version(_tensors_in((x, ys)))
            _fn = _current.fn
            if _autocast_is_on():
                _result = _call_plainly(_fn, x, ys)
            elif _records:
                _set_grad_enabled(False)
                try:
                    _result = _fn(x, ys)
                finally:
                    _set_grad_enabled(True)
            else:
                _result = _fn(x, ys)
            if not _isinstance(_result, _Tensor):
                _result = _structure(_result, _fn)
            try:
                _alias = (
                    not (
                        (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
                    )
                    or _result is x
                    or _id(_result) in _map(_id, ys or ())
                )
            except _RuntimeError:
                _alias = True  # perhaps: a layout without a storage of its own
            if _alias and _share_memory((x, ys), (_result,)):
                raise _alias_error(_result, _fn, (x, ys), {})
            return _result
        _apply = _node.apply
        if _apply is not None:
            try:
                return _apply(_current.direct, x, ys)
            except _errors as _error:
                _node.explain(_error)
                raise
    return _general(_keyset, _current, (x, ys), {})

# CompositeExplicitAutograd
def kernel(x, ys):
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, ys)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, ys)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, ys)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
            or _id(_result) in _map(_id, ys or ())
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, ys), (_result,)):
        raise _alias_error(_result, _fn, (x, ys), {})
    return _result

# CompositeExplicitAutograd, called directly
def kernel(x, ys):
    _increment_version(_tensors_in((x, ys)))
    _fn = _current.fn
    if _autocast_is_on() or _is_excluded(_conjugate):
        _result = _call_plainly(_fn, x, ys)
    elif _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            _result = _fn(x, ys)
        finally:
            _set_grad_enabled(True)
    else:
        _result = _fn(x, ys)
    if not _isinstance(_result, _Tensor):
        _result = _structure(_result, _fn)
    try:
        _alias = (
            not (
                (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
            )
            or _result is x
            or _id(_result) in _map(_id, ys or ())
        )
    except _RuntimeError:
        _alias = True  # perhaps: a layout without a storage of its own
    if _alias and _share_memory((x, ys), (_result,)):
        raise _alias_error(_result, _fn, (x, ys), {})
    return _result

# ADInplaceOrView
def ad_inplace_or_view(_keyset, /, x, ys):
    _current = _fast_path.get(_keyset.raw_repr())
    if _current is not None and _forward_ad._current_level < 0:
        _increment_version(_tensors_in((x, ys)))
        _fn = _current.fn
        if _autocast_is_on():
            _result = _call_plainly(_fn, x, ys)
        elif _is_grad_enabled():
            _set_grad_enabled(False)
            try:
                _result = _fn(x, ys)
            finally:
                _set_grad_enabled(True)
        else:
            _result = _fn(x, ys)
        if not _isinstance(_result, _Tensor):
            _result = _structure(_result, _fn)
        try:
            _alias = (
                not (
                    (_s := _result.untyped_storage()).resizable() and _uses(_s._cdata) == 2
                )
                or _result is x
                or _id(_result) in _map(_id, ys or ())
            )
        except _RuntimeError:
            _alias = True  # perhaps: a layout without a storage of its own
        if _alias and _share_memory((x, ys), (_result,)):
            raise _alias_error(_result, _fn, (x, ys), {})
        return _result
    return _general(_keyset, (x, ys), {})

# Autograd, apply
def apply(_kernel, x, ys):
    _outcome = _Outcome()
    _result = _function(_kernel, _outcome, x, *ys)
    if _outcome.mutated:
        _attach_graph(_outcome, _result)
    return _unflatten((_result if _isinstance(_result, _tuple) else (_result,)), _outcome.lengths)[0]

# Autograd, forward
def forward(_ctx, _kernel, _outcome, *_flat):
    x = _flat[0]
    ys = _flat[1:]
    _inputs = {0: x, 1: _list(ys)}
    _originals, _dirty = _mutation.begin(_inputs, _flat)
    with _mutation.recorded(_dirty):
        _result = _kernel(x, _list(ys))
    _outputs = _mutation.end(_ctx, _outcome, _inputs, (_result,), _dirty)
    x = _inputs[0]
    ys = _inputs[1]
    _needs = _ctx._customops_raw_flags[2:]
    _like = _metadata
    _ctx._customops_expected = (_like(x) if _needs[0] else None, [_like(x) if flag else None for x, flag in _zip(ys, _needs[1:])] if False in _needs[1:] else [*_map(_like, ys)])
    _ctx._customops_flags = _ctx._customops_raw_flags
    return _mutation.flatten_outputs(_ctx, _outcome, _outputs)

# Autograd, backward
def backward(_ctx, *_grads):
    _grads = _unflatten(_grads, _ctx._customops_outputs)
    if _ctx._customops_zeros is not None:
        _grads = _tuple(_map(_materialize_zeros, _grads, _ctx._customops_zeros))
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
        _grad_x, _grad_ys, = _result
        _like_x, _like_ys, = _likes
        if _grad_ys is None:
            _grad_ys = _none_for_each(_like_ys)
        if ((_like_x is None or _like_x == (_grad_x.shape, _grad_x.dtype, _grad_x.device)) if _isinstance(_grad_x, _Tensor) else _grad_x is _like_x) and _list_fits(_grad_ys, _like_ys):
            return None, None, _grad_x, *_grad_ys
    _none_allowed = _any(grad is None for grad in _grads)
    return None, None, *_check(_result, _likes, none_allowed=_none_allowed)
