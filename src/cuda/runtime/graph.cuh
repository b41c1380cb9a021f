// Capturing and replaying programs; see graph.cu.
#pragma once
#include <memory>

#include "runtime/device.h"

namespace dlsys {
namespace cuda {

std::unique_ptr<CapturedGraph> Capture(int id, DLStream stream, const CaptureRequest& request);

}  // namespace cuda
}  // namespace dlsys
