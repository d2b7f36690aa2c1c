"""Compiled programs that outlive the process: a PJRT plugin in front of the device's own, with a folder of programs.

torch_xla 2.9 writes its persistent cache and cannot read it back. It loads a device's compiler and runtime as a shared
library; `native/` is such a library, which forwards to the device's and keeps what it compiles. The rest of this
package finds it, makes torch_xla load it, and reads its counters.
"""
