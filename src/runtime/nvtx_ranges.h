// Named ranges on the host's timeline, for profilers. Until a marker is set in `range_marker`, a
// step pays one load and one branch.
#pragma once

namespace dlsys {

struct RangeMarker {
  void (*push)(const char* name);
  void (*pop)();
};
inline const RangeMarker* range_marker = nullptr;  // set while the library loads, if at all

// A range as long as this object lives.
class Range {
 public:
  explicit Range(const char* name) : marker_(range_marker) {
    if (marker_) marker_->push(name);
  }
  ~Range() {
    if (marker_) marker_->pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const RangeMarker* const marker_;
};

}  // namespace dlsys
