"""What CuPy has from libraries that the fake GPU cannot serve, by NumPy, when CuPy is imported.

Random numbers are cuRAND's. Sorting is Thrust's, into which CUDA's runtime is linked, so that it
looks for a real driver.
"""

import importlib.abc
import importlib.machinery
import sys


class _Generator:
    def __init__(self, seed=None):
        import numpy

        self._generator = numpy.random.default_rng(seed)

    def standard_normal(self, size=None, dtype="float64"):
        import cupy

        return cupy.asarray(self._generator.standard_normal(size, dtype))

    def random(self, size=None, dtype="float64"):
        import cupy

        return cupy.asarray(self._generator.random(size, dtype))


def _on_host(name):
    import cupy
    import numpy

    def sort(a, axis=-1, kind=None):
        return cupy.asarray(getattr(numpy, name)(a.get(), axis=axis))

    return sort


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "cupy":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                shared = _Generator()
                module.random.default_rng = _Generator
                module.random.standard_normal = shared.standard_normal
                module.random.random = shared.random
                module.sort, module.argsort = _on_host("sort"), _on_host("argsort")
                program = module.cuda.compiler._NVRTCProgram
                compile_now = program.compile

                def compile_quickly(self, options=(), log_stream=None):
                    # Headers are parsed once a process: half the time of CuPy's own kernels.
                    return compile_now(self, (*options, "--pch"), log_stream)

                program.compile = compile_quickly

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
