// Waiting on a core, which leaves it to its other thread between two looks.
#pragma once

#include <chrono>

namespace uncut {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether something is the case within so long, asked again and again.
template <typename Done>
bool spin(double spin_s, Done done) {
    using Clock = std::chrono::steady_clock;
    constexpr int looks_per_clock = 32;
    const auto until =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(spin_s));
    do {
        for (int i = 0; i < looks_per_clock; ++i) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < until);
    return false;
}

}  // namespace uncut
