"""Inductor, with what it makes for the first program of a process: forks of one that has imported this have it, too."""

from torch._inductor import codecache
from torch._inductor.fx_passes import joint_graph, post_grad

codecache.torch_key()
codecache.CacheBase.get_system()
joint_graph.lazy_init()
post_grad.lazy_init()
