#include "runtime/allocator.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "runtime/registry.h"

namespace dlsys {
namespace {

const size_t kSmallestStep = 512;
const size_t kLargestStep = size_t{2} << 20;

std::string BytesText(size_t nbytes) {
  static const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = (double)nbytes;
  int unit = 0;
  for (; value >= 1024 && unit < 5; unit++) value /= 1024;
  char text[64];
  snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
  return text;
}

// Memory checkers see what runs over a block only where blocks have their true size and go back.
bool DebugSeparate() {
  const char* text = getenv("DLSYS_DEBUG_ARENA");
  return text && !strcmp(text, "separate");
}

}  // namespace

CachingAllocator::CachingAllocator(const Device& device, int id)
    : device_(device), id_(id), separate_(DebugSeparate()) {}

size_t BlockSize(size_t nbytes) {
  if (nbytes > SIZE_MAX - kLargestStep) return nbytes;  // no device has it: refused there
  size_t power = kSmallestStep;
  while (power <= nbytes / 2) power *= 2;
  const size_t step = std::clamp(power / 8, kSmallestStep, kLargestStep);
  return std::max(step, (nbytes + step - 1) / step * step);
}

void* CachingAllocator::Alloc(size_t nbytes, DLStream stream) {
  const size_t size = separate_ ? std::max<size_t>(nbytes, 1) : BlockSize(nbytes);
  void* data = TakeCached(size, stream);
  if (!data) data = TakeNew(size, stream);
  if (!data) {
    Trim();
    data = TakeNew(size, stream);
  }
  if (!data) FailOutOfMemory(nbytes);
  stats_.requests++;
  stats_.in_use_nbytes += (int64_t)size;
  stats_.peak_in_use_nbytes = std::max(stats_.peak_in_use_nbytes, stats_.in_use_nbytes);
  return data;
}

void* CachingAllocator::TakeCached(size_t nbytes, DLStream stream) {
  auto pool = pools_.find({stream, nbytes});
  if (pool == pools_.end() || pool->second.empty()) return nullptr;
  void* data = pool->second.back();
  pool->second.pop_back();
  blocks_.at(data).in_use = true;
  return data;
}

void* CachingAllocator::TakeNew(size_t nbytes, DLStream stream) {
  void* data = device_.alloc(id_, nbytes);
  if (!data) return nullptr;
  blocks_[data] = {nbytes, stream, true};
  stats_.device_allocations++;
  stats_.reserved_nbytes += (int64_t)nbytes;
  return data;
}

void CachingAllocator::Free(void* data) {
  auto found = blocks_.find(data);
  if (found == blocks_.end())
    Fail("DLMemoryFree: %p was not allocated on %s(%d)", data, DeviceText(device_.type), id_);
  Block& block = found->second;
  if (!block.in_use)
    Fail("DLMemoryFree: %p on %s(%d) was already freed", data, DeviceText(device_.type), id_);
  pools_[{block.stream, block.nbytes}].push_back(data);
  block.in_use = false;
  stats_.in_use_nbytes -= (int64_t)block.nbytes;
  if (separate_) Trim();
}

void CachingAllocator::Trim() {
  for (auto& [key, pool] : pools_) {
    for (; !pool.empty(); pool.pop_back()) {
      device_.release(id_, pool.back());
      blocks_.erase(pool.back());
      stats_.device_frees++;
      stats_.reserved_nbytes -= (int64_t)key.second;
    }
  }
  pools_.clear();
}

void CachingAllocator::Adopt(DLStream stream) {
  if (!stream) return;
  for (auto& [data, block] : blocks_) {
    if (block.stream != stream) continue;
    block.stream = nullptr;
    if (!block.in_use) pools_[{nullptr, block.nbytes}].push_back(data);
  }
  auto of_stream = [&](auto pool) { return pool != pools_.end() && pool->first.first == stream; };
  auto pool = pools_.lower_bound({stream, 0});
  while (of_stream(pool)) pool = pools_.erase(pool);
}

void CachingAllocator::FailOutOfMemory(size_t nbytes) const {
  std::vector<size_t> sizes;
  for (const auto& [data, block] : blocks_)
    if (block.in_use) sizes.push_back(block.nbytes);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  std::string largest;
  for (size_t k = 0; k < std::min<size_t>(sizes.size(), 5); k++)
    largest += (k ? ", " : "") + BytesText(sizes[k]);
  size_t free_nbytes = 0, total_nbytes = 0;
  device_.memory(id_, &free_nbytes, &total_nbytes);
  FailWith(DL_OUT_OF_MEMORY,
           "out of memory on %s(%d): requested %s, free %s of %s, in use by arrays %s; largest "
           "blocks: %s",
           DeviceText(device_.type), id_, BytesText(nbytes).c_str(), BytesText(free_nbytes).c_str(),
           BytesText(total_nbytes).c_str(), BytesText((size_t)stats_.in_use_nbytes).c_str(),
           largest.empty() ? "none" : largest.c_str());
}

}  // namespace dlsys
