# The notebook of parllel's Array, cell by cell, with its imports renamed and nothing else, except
# where a comment says so.

import numpy as np
from rlpool import Array

array = Array(batch_shape=(5, 4), dtype=np.float32)  # use batch_shape instead of shape
array[:] = np.arange(4)
print(array)

ndarray = array.to_ndarray()
print(ndarray.sum(axis=-1))

array = Array(batch_shape=(5, 4), dtype=np.float32, padding=1)
array[:] = np.arange(4)
array[5] = [4, 5, 6, 7]  # note that this appears to be out of bounds!
print(array)
print(array[5])
print(array[array.last + 1])
assert array.last + 1 == 5

array[...] = 0
array.rotate()
print(array[0])  # [4, 5, 6, 7] has been copied to the 0th position in the array

array = Array(batch_shape=(5, 4), dtype=np.float32, full_size=10)  # replaces leading batch dimension, e.g. 5
array[...] = 7
array.rotate()
array[...] = 42
array.rotate()
print(array)
array.rotate()
print(array)

array = Array(batch_shape=(5, 4), dtype=np.float32, padding=1)
array[...] = np.arange(np.prod(array.shape)).reshape(array.shape)
array[-1] = np.arange(-4, 0)
print(array)
print("previous:\n", array.previous)
print("next:\n", array.next)

print(array[2])
print("previous: ", array[2].previous)
print("next: ", array[2].next)

import multiprocessing as mp

array = Array(batch_shape=(5, 4), dtype=np.int32, storage="shared")

def write_to_piped_array(pipe):
    arr = pipe.recv()
    arr[...] = 42
from rlpool.patterns import write_to_piped_array

# Added: the guard that a script needs and a notebook does not.
if __name__ == "__main__":
    parent_pipe, child_pipe = mp.Pipe()
    p = mp.Process(target=write_to_piped_array, args=(child_pipe,))
    p.start()
    parent_pipe.send(array[np.array([1, 3]), np.array([0, 2])])  # unlike for ndarrays, this does not produce a copy
    p.join()

    print(array)

    # array.close()  # always close arrays allocated in shared memory
