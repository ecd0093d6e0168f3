"""Run docs/tour.ipynb and keep its outputs: the texts and pictures that a reader sees.

    python docs/build_tour.py

The notebook is its own source. To change it, edit it in Jupyter or as text, then run this. Its metadata have no times
and no versions, so that a diff shows what changed.
"""

import os
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default
from traitlets.config import Config

NOTEBOOK = Path(__file__).parent / "tour.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class OwnKernel(AsyncKernelManager):
    """The kernel of sys.executable, not one that is installed for the user under the same name."""

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def executed(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel. An error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = nbformat.from_dict(METADATA)
    # the sockets and IPython's files go with the directory; the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="tour-") as place:
        # sockets in the file system: nothing listens on the network
        connection = Config(ConnectionFileMixin={"transport": "ipc", "connection_file": f"{place}/kernel.json"})
        client = NotebookClient(
            notebook,
            kernel_manager_class=OwnKernel,
            config=connection,
            # long enough for a busy machine: a late output would be lost
            timeout=300,
            startup_timeout=300,
            iopub_timeout=60,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": place}},
        )
        # one thread adds in the same order everywhere. tqdm, which transformers imports, misses its widgets
        more = {"IPYTHONDIR": place, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
        client.execute(env=os.environ | more)
    # nbclient notes the version of Python
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
    print(f"{NOTEBOOK}, {NOTEBOOK.stat().st_size / 1000:.0f} kB")
