// Six kernels to read, change and break; `python docs/learn/programs/1_kernels.py` compiles and runs them,
// for a GPU or for the emulated one. Blocks and grids are lines: a tile's row and column come from
// threadIdx.x. Matrices are square, row-major float32, of n rows, a multiple of kTile.
#include <cuda_runtime.h>

constexpr int kThreads = 256, kTile = 16;  // a tile has a thread an element

// c = a + b. Each thread starts at its number in the grid and goes on by the size of the grid.
__global__ void Add(const float* a, const float* b, float* c, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    c[i] = a[i] + b[i];
}

// y = x transposed. Neighboring threads read neighbors, and write n elements apart.
__global__ void Transpose(const float* x, float* y, int n) {
  const int row = blockIdx.x / (n / kTile) * kTile + threadIdx.x / kTile;
  const int col = blockIdx.x % (n / kTile) * kTile + threadIdx.x % kTile;
  y[col * n + row] = x[row * n + col];
}

// The same by way of shared memory, so that neighboring threads write neighbors too. The column
// more in the tile leads the elements of one of its columns to different banks.
__global__ void TransposeTiled(const float* x, float* y, int n) {
  __shared__ float tile[kTile][kTile + 1];
  const int first_row = blockIdx.x / (n / kTile) * kTile, i = threadIdx.x / kTile;
  const int first_col = blockIdx.x % (n / kTile) * kTile, j = threadIdx.x % kTile;
  tile[i][j] = x[(first_row + i) * n + first_col + j];
  __syncthreads();
  y[(first_col + i) * n + first_row + j] = tile[j][i];
}

// sums[block] = the sum of the block's elements, by a tree in shared memory.
__global__ void Sum(const float* x, float* sums, int n) {
  __shared__ float values[kThreads];
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    sum += x[i];
  values[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = values[0];
}

// c = a b. Each thread reads a row of a and a column of b.
__global__ void Product(const float* a, const float* b, float* c, int n) {
  const int row = blockIdx.x / (n / kTile) * kTile + threadIdx.x / kTile;
  const int col = blockIdx.x % (n / kTile) * kTile + threadIdx.x % kTile;
  float sum = 0;
  for (int k = 0; k < n; k++) sum += a[row * n + k] * b[k * n + col];
  c[row * n + col] = sum;
}

// The same, a tile of a and one of b at a time: each element is read once a block and used kTile
// times.
__global__ void ProductTiled(const float* a, const float* b, float* c, int n) {
  __shared__ float left[kTile][kTile], right[kTile][kTile];
  const int i = threadIdx.x / kTile, j = threadIdx.x % kTile;
  const int row = blockIdx.x / (n / kTile) * kTile + i;
  const int col = blockIdx.x % (n / kTile) * kTile + j;
  float sum = 0;
  for (int k = 0; k < n; k += kTile) {
    left[i][j] = a[row * n + k + j];
    right[i][j] = b[(k + i) * n + col];
    __syncthreads();  // the tiles are there
    for (int d = 0; d < kTile; d++) sum += left[i][d] * right[d][j];
    __syncthreads();  // nobody reads them any more
  }
  c[row * n + col] = sum;
}

// ---- the host: it copies inputs to the GPU, launches, and copies the result back ----

// An array in the GPU's memory, with what the host's holds.
struct Array {
  float* data = nullptr;
  size_t nbytes;
  Array(const float* host, int count) : nbytes(count * sizeof(float)) {
    cudaMalloc((void**)&data, nbytes);
    cudaMemcpyAsync(data, host, nbytes, cudaMemcpyHostToDevice, 0);
  }
  ~Array() { cudaFree(data); }
};

// Milliseconds of a launch, as the mean of some behind a first one.
template <class... Params, class... Args>
float Milliseconds(int repeats, int blocks, void (*kernel)(Params...), Args... args) {
  cudaLaunchConfig_t config = {};  // what kernel<<<blocks, kThreads>>>(args...) makes of it
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  cudaEvent_t begin, end;
  cudaEventCreateWithFlags(&begin, cudaEventDefault);
  cudaEventCreateWithFlags(&end, cudaEventDefault);
  for (int k = 0; k <= repeats; k++) {
    if (k == 1) cudaEventRecord(begin, 0);
    cudaLaunchKernelEx(&config, kernel, args...);
  }
  cudaEventRecord(end, 0);
  cudaEventSynchronize(end);
  float ms = 0;
  cudaEventElapsedTime(&ms, begin, end);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms / repeats;
}

// Runs kernel number `which` of n (elements or rows) on host arrays of these sizes: its
// milliseconds, or CUDA's status as a negative number.
extern "C" __attribute__((visibility("default"))) float run(int which, int repeats, int blocks,
                                                            int n, const float* a, int a_size,
                                                            const float* b, int b_size, float* c,
                                                            int c_size) {
  const Array x(a, a_size), y(b, b_size), out(c, c_size);
  const float *from = x.data, *other = y.data;
  float* to = out.data;
  float ms = 0;
  if (which == 0) ms = Milliseconds(repeats, blocks, Add, from, other, to, n);
  if (which == 1) ms = Milliseconds(repeats, blocks, Transpose, from, to, n);
  if (which == 2) ms = Milliseconds(repeats, blocks, TransposeTiled, from, to, n);
  if (which == 3) ms = Milliseconds(repeats, blocks, Sum, from, to, n);
  if (which == 4) ms = Milliseconds(repeats, blocks, Product, from, other, to, n);
  if (which == 5) ms = Milliseconds(repeats, blocks, ProductTiled, from, other, to, n);
  cudaMemcpyAsync(c, to, out.nbytes, cudaMemcpyDeviceToHost, 0);
  cudaStreamSynchronize(0);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? ms : -(float)status;
}
