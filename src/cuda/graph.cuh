// Recording and replaying programs; see graph.cu.
#pragma once
#include <memory>

#include "device.h"

namespace dlsys {
namespace cuda {

std::unique_ptr<Recorded> Record(int id, DLStream stream, void (*body)(void* state), void* state,
                                 const DLCopy* before, int64_t nbefore, const DLCopy* after,
                                 int64_t nafter);

}  // namespace cuda
}  // namespace dlsys
