// An interpreter of PTX on the CPU, to test kernels where there is no GPU; written from the text of the PTX ISA.
//
// What a GPU leaves open is chosen badly on purpose:
//   * warps take turns at random points, blocks run in a random order, the sides of a branch too; threads meet again
//     only where an instruction asks for it (.sync) or by chance (the group that is behind goes first, mostly);
//   * registers and shared memory begin undefined, lane by lane and byte by byte; what is computed of them is undefined
//     too, and it is reported where it decides a branch, an address or a value in global memory;
//   * every access to shared and global memory is compared with those of other threads: two that no barrier orders, one
//     of them a write, are a race, whether or not it did harm in this order;
//   * asynchronous copies arrive at once or when they are waited for, by chance; what touches their target before is
//     reported;
//   * approximate instructions are off by a part of what the ISA allows; sums of mma are truncated.
// Not modelled: caches, streams side by side, several blocks at a time (their races are seen all the same), SASS. Not
// done: calls of functions, groups of cp.async, wgmma, TMA, clusters, atomics, fences, and what neither the kernels here nor
// CuPy's ask for: shuffles other than bfly, votes other than any.
//
// Environment: PTX_SEED, PTX_EXACT (numbers.h), PTX_TRACE=1 (a line a launch, to stderr).
#pragma once
#include <string>

#include "memory.h"

struct Function;
struct Module;

Module* load_ptx(const char* text, std::string* error);
Function* find_function(Module*, const char* name);
const std::string& name_of(Function*);
const std::vector<u32>& parameter_bytes(Function*);
u32 static_shared(Function*);
u32 most_threads(Function*);
std::vector<std::string> names_of(Module*);

// Run a grid, block after block in a random order, their warps interleaved at random. Returns whether it ended.
bool run_grid(Function*, const u32 grid[3], const u32 block[3], u32 dynamic_shared, void** arguments, Memory*);

// What was found so far, a line each with how often; and forget it.
void found(const std::string& where, const std::string& what);
std::string findings();
// A line for each kernel that ran: instructions of warps, and those that multiply matrices.
std::string counts();
