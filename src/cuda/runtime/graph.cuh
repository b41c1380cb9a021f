// Recording and replaying programs; see graph.cu.
#pragma once
#include <memory>

#include "runtime/device.h"

namespace dlsys {
namespace cuda {

std::unique_ptr<Recorded> Record(int id, DLStream stream, const Script& script);

}  // namespace cuda
}  // namespace dlsys
