"""Everything that a training run needs beside the model: data, processes, its folder, its state, its curves."""
