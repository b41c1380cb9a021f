"""Written by `make interface` from the native library."""

TEXT = """\
enum DL_OK 0
enum DL_ERROR 1
enum DL_OUT_OF_MEMORY 2
enum DL_DEVICE_LOST 3
enum DL_UNAVAILABLE 4
enum DL_NOT_APPLICABLE 5
enum DL_OUT_OF_RANGE 6
enum DL_CPU 1
enum DL_GPU 2
device cpu 1 cpu 0
device gpu 2 cuda 1
dtype float32 0
dtype float64 1
dtype int32 2
dtype int64 3
dtype uint8 4
dtype bool 5
dtype bfloat16 6
dtype float16 7
activation relu 1
activation sigmoid 2
activation tanh 3
activation silu 4
activation gelu 5
activation gelu_tanh 6
activation softplus 7
activation hard_sigmoid 8
activation hard_swish 9
activation_gradient relu_gradient 1
activation_gradient silu_gradient 2
activation_gradient gelu_gradient 3
activation_gradient gelu_tanh_gradient 4
activation_gradient softplus_gradient 5
activation_gradient hard_swish_gradient 6
activation_gradient mul_quantized 7
activation_gradient add 8
activation_gradient add_relu 9
opcode neg 1 1
opcode exp 2 1
opcode log 3 1
opcode sqrt 4 1
opcode tanh 5 1
opcode cos 6 1
opcode sin 7 1
opcode sigmoid 8 1
opcode relu 9 1
opcode log1p 10 1
opcode rsqrt 11 1
opcode abs 12 1
opcode sign 13 1
opcode silu 14 1
opcode gelu 15 1
opcode gelu_tanh 16 1
opcode softplus 17 1
opcode hard_sigmoid 18 1
opcode hard_swish 19 1
opcode logical_not 20 1
opcode floor 21 1
opcode round 22 1
opcode expm1 23 1
opcode truth 24 1
opcode trunc_to_int64 25 1
opcode round_to_bfloat16 26 1
opcode round_to_float16 27 1
opcode add 28 2
opcode sub 29 2
opcode mul 30 2
opcode div 31 2
opcode pow 32 2
opcode relu_gradient 33 2
opcode minimum 34 2
opcode maximum 35 2
opcode silu_gradient 36 2
opcode gelu_gradient 37 2
opcode gelu_tanh_gradient 38 2
opcode softplus_gradient 39 2
opcode hard_swish_gradient 40 2
opcode pow_const 41 2
opcode leaky_relu 42 2
opcode elu 43 2
opcode huber 44 2
opcode equal 45 2
opcode not_equal 46 2
opcode less 47 2
opcode less_equal 48 2
opcode logical_and 49 2
opcode logical_or 50 2
opcode logical_xor 51 2
opcode clip 52 3
opcode where 53 3
opcode clip_gradient 54 4
opcode leaky_relu_gradient 55 4
opcode elu_gradient 56 4
operand A 1
operand B 2
limit max_ndim 8
limit communicator_id_nbytes 128
limit mlp_head_layers 6
limit weight_update_gemms 8
limit pointwise_instructions 24
limit pointwise_inputs 8
limit pointwise_immediates 16
limit pointwise_first_immediate 64
units 32 winograd
units 8 winograd 2x2
units 32 winograd 4x4
units 32 fft
units 64 cudnn
units 8 cudnn fft
units 8 cudnn tiled_fft
units 64 cudnn winograd
units 64 cudnn winograd_in_parts
units 131072 cudnn winograd_5x5
limit units_fp32 64
limit units_tf32 16448
rule sgd_update 0
slots sgd_update
constants sgd_update
rule sgd_momentum_update 0
slots sgd_momentum_update velocity
constants sgd_momentum_update momentum share nesterov
rule adam_update 0
slots adam_update mean square
constants adam_update mean_keep mean_take square_keep square_take eps
rule rmsprop_update 0
slots rmsprop_update square
constants rmsprop_update keep take eps momentum
rule rmsprop_centered_update 0
slots rmsprop_centered_update square mean
constants rmsprop_centered_update keep take eps momentum
rule rmsprop_momentum_update 0
slots rmsprop_momentum_update square velocity
constants rmsprop_momentum_update keep take eps momentum
rule rmsprop_centered_momentum_update 0
slots rmsprop_centered_momentum_update square mean velocity
constants rmsprop_centered_momentum_update keep take eps momentum
rule adagrad_update 0
slots adagrad_update total
constants adagrad_update eps
rule lion_update 0
slots lion_update mean
constants lion_update direction_keep direction_take mean_keep mean_take
rule average_update 0
slots average_update
constants average_update decay
rule accumulate_update 1
slots accumulate_update
constants accumulate_update
struct DLContext 8
field DLContext device_id int32 0 4
field DLContext device_type int32 4 4
struct DLArray 32
field DLArray data pointer 0 8
field DLArray ctx DLContext 8 8
field DLArray ndim int32 16 4
field DLArray dtype int32 20 4
field DLArray shape pointer 24 8
struct DLArrayList 16
field DLArrayList count int64 0 8
field DLArrayList arrays pointer 8 8
struct DLBytes 16
field DLBytes nbytes int64 0 8
field DLBytes data pointer 8 8
struct DLValue 8
field DLValue p pointer 0 8
field DLValue i int64 0 8
field DLValue f float32 0 4
struct DLKernelEntry 72
field DLKernelEntry name pointer 0 8
field DLKernelEntry device pointer 8 8
field DLKernelEntry sig pointer 16 8
field DLKernelEntry dtype int64 24 8
field DLKernelEntry call pointer 32 8
field DLKernelEntry invoke pointer 40 8
field DLKernelEntry fits pointer 48 8
field DLKernelEntry file pointer 56 8
field DLKernelEntry line int64 64 8
struct DLStep 16
field DLStep kernel int32 0 4
field DLStep first int32 4 4
field DLStep nargs int32 8 4
field DLStep place int32 12 4
struct DLMemoryStats 48
field DLMemoryStats device_allocations int64 0 8
field DLMemoryStats device_frees int64 8 8
field DLMemoryStats reserved_nbytes int64 16 8
field DLMemoryStats in_use_nbytes int64 24 8
field DLMemoryStats peak_in_use_nbytes int64 32 8
field DLMemoryStats requests int64 40 8
struct DLCounters 24
field DLCounters program_launches int64 0 8
field DLCounters kernel_launches int64 8 8
field DLCounters synchronizations int64 16 8
struct DLCopy 24
field DLCopy dst pointer 0 8
field DLCopy src pointer 8 8
field DLCopy nbytes int64 16 8
struct DLGraphInfo 32
field DLGraphInfo nodes int64 0 8
field DLGraphInfo kernels int64 8 8
field DLGraphInfo copies int64 16 8
field DLGraphInfo fills int64 24 8
struct DLGraphStreams 32
field DLGraphStreams stream pointer 0 8
field DLGraphStreams waits pointer 8 8
field DLGraphStreams nwaits int64 16 8
field DLGraphStreams ready_inputs pointer 24 8
struct UpdateOptions 40
field UpdateOptions every int64 0 8
field UpdateOptions clip float32 8 4
field UpdateOptions l2 float32 12 4
field UpdateOptions decay float32 16 4
field UpdateOptions constants float32*5 20 20
struct AllReduceUpdateOptions 56
field AllReduceUpdateOptions update UpdateOptions 0 40
field AllReduceUpdateOptions ranks int64 40 8
field AllReduceUpdateOptions shares int32 48 4
struct WeightUpdateOptions 120
field WeightUpdateOptions update UpdateOptions 0 40
field WeightUpdateOptions precision int32 40 4
field WeightUpdateOptions sums int32*8 44 32
field WeightUpdateOptions u8 int32*8 76 32
field WeightUpdateOptions ranks int64 112 8
struct Instruction 8
field Instruction opcode uint8 0 1
field Instruction destination uint8 1 1
field Instruction operands uint8*4 2 4
field Instruction unused uint8*2 6 2
struct Bytecode 264
field Bytecode code Instruction*25 0 200
field Bytecode immediates float32*16 200 64
struct HeadLayer 16
field HeadLayer transposed int32 0 4
field HeadLayer has_bias int32 4 4
field HeadLayer activation int32 8 4
field HeadLayer dact int32 12 4
struct Permutation 32
field Permutation axes int32*8 0 32
struct HW 16
field HW h int64 0 8
field HW w int64 8 8
struct WindowOptions 80
field WindowOptions size HW 0 16
field WindowOptions stride HW 16 16
field WindowOptions before HW 32 16
field WindowOptions after HW 48 16
field WindowOptions dilation HW 64 16
struct HeadOptions 108
field HeadOptions precision int32 0 4
field HeadOptions scale float32 4 4
field HeadOptions dy float32 8 4
field HeadOptions layers HeadLayer*6 12 96
function DLDeviceCount int32 pointer
function DLDeviceName DLContext pointer int64
function DLDeviceMemory DLContext pointer pointer
function DLGetCounters pointer
function DLStreamCreate DLContext pointer
function DLStreamFree DLContext pointer
function DLStreamSynchronize DLContext pointer
function DLStreamDrain DLContext pointer
function DLStreamWait DLContext pointer pointer
function DLCommunicatorId DLContext pointer
function DLCommunicatorCreate DLContext pointer int32 int32 pointer
function DLCommunicatorCheck DLContext int64
function DLCommunicatorSumsInKernels DLContext int64 pointer
function DLCommunicatorMemory DLContext int64 int64 pointer
function DLMemoryAlloc DLContext int64 pointer pointer
function DLMemoryFree DLContext pointer
function DLMemoryTrim DLContext
function DLMemoryGetStats DLContext pointer
function DLMemoryResetPeak DLContext
function DLHostAlloc DLContext int64 pointer
function DLHostFree DLContext pointer
function DLMemoryFill DLContext pointer int32 int64 pointer
function DLMemoryCopy pointer DLContext pointer DLContext int64 pointer
function DLAlgorithmSource int64 int64 pointer
function DLKernelFits int64 pointer pointer
function DLKernelWorkspace int64 pointer pointer
function DLPlaceNumber pointer pointer
function DLKernelCall pointer pointer int64 pointer
function DLProgramCreate pointer int64 pointer int64 pointer
function DLProgramRun pointer pointer
function DLProgramProfile pointer DLContext pointer pointer
function DLProgramCapture pointer DLContext pointer pointer int64 pointer int64 pointer pointer
function DLGraphReplay pointer pointer int64
function DLGraphReplayAndWait pointer pointer
function DLGraphDescribe pointer pointer
function DLGraphFree pointer
function DLProgramFree pointer
function DLCpuSetThreads int32
function DLCpuGetThreads pointer
"""
