"""What nvidia-smi and rocm-smi print, written by hand in their shapes."""

TABLE = """
Sun Nov 15 08:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.173.02             Driver Version: 580.173.02     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:3B:00.0 Off |                    0 |
| N/A   61C    P0            269W /  700W |   79284MiB /  81559MiB |     68%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          Off |   00000000:5E:00.0 Off |                    2 |
| N/A   34C    P0             70W /  700W |   20480MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A         2632314      C   VLLM::EngineCore                      74000MiB |
|    0   N/A  N/A            8320      G   /usr/bin/gnome shell                   5000MiB |
|    1   N/A  N/A           10315    C+G   ...exec/xdg-desktop-portal               57MiB |
+-----------------------------------------------------------------------------------------+
"""
OLD = """
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.87.00    Driver Version: 418.87.00    CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  Tesla V100-SXM2...  On   | 00000000:00:04.0 Off |                    0 |
| N/A   36C    P0    39W / 300W |   1000MiB / 16160MiB |      1%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
|    0     12345      C   python3                                      990MiB |
+-----------------------------------------------------------------------------+
"""
GB10 = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   50C    P0             12W /  N/A  | Not Supported          |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""
MIG = """
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.54.03              Driver Version: 535.54.03    CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
|   0  NVIDIA A100-SXM4-80GB          On  | 00000000:00:06.0 Off |                   On |
| N/A   47C    P0              78W / 400W |     50MiB / 81920MiB |     N/A      Default |
|                                         |                      |              Enabled |
+-----------------------------------------+----------------------+----------------------+
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |
|==================+================================+===========+=======================|
|  0    3   0   0  |            9012MiB /  9728MiB  | 14      0 |  1   0    1    0    0 |
|                  |               0MiB / 16383MiB  |           |                       |
+------------------+--------------------------------+-----------+-----------------------+
| Processes:                                                                            |
|    0    3    0      77777      C   VLLM::EngineCore                          9000MiB |
+---------------------------------------------------------------------------------------+
"""
BROKEN = """
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 525.60.13    Driver Version: 525.60.13    CUDA Version: 12.0     |
|-------------------------------+----------------------+----------------------+
|   0  NVIDIA A10          Off  | 00000000:01:00.0 Off |                 ERR! |
|ERR!  ERR! ERR!    ERR! / ERR! |   GPU is lost        |    ERR!         ERR! |
|                               |                      |                 ERR! |
+-------------------------------+----------------------+----------------------+
"""
FULL = """
==============NVSMI LOG==============

Timestamp                                 : Sun Nov 15 08:00:00 2026
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Persistence Mode                      : Enabled
    GPU Recovery Action                   : None
    FB Memory Usage
        Total                             : 81920 MiB
        Reserved                          : 541 MiB
        Used                              : 79000 MiB
        Free                              : 2379 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 4 MiB
    Utilization
        Gpu                               : 97 %
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : 3
        Aggregate
            DRAM Uncorrectable            : 4
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : 61 C
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4242
            Type                          : C
            Name                          : VLLM::EngineCore
            Used GPU Memory               : 78456 MiB
"""
CSV = """
index, name, driver_version, memory.used [MiB], memory.total [MiB], utilization.gpu [%], temperature.gpu
0, NVIDIA L40S, 550.54.15, 40000 MiB, 46068 MiB, 93 %, 71
1, NVIDIA L40S, 550.54.15, [N/A], 46068 MiB, [N/A], 40

pid, process_name, used_gpu_memory [MiB]
4242, VLLM::EngineCore, 39500 MiB
911, /usr/bin/python3, [N/A]
"""
ROCM = """
============================================ ROCm System Management Interface ============================================
====================================================== Concise Info ======================================================
Device  Node  IDs              Temp        Power     Partitions          SCLK    MCLK    Fan  Perf  PwrCap  VRAM%  GPU%
==========================================================================================================================
0       2     0x74a1,   55354  51.0°C      152.0W    NPS1, SPX, 0        134Mhz  900Mhz  0%   auto  750.0W  91%    37%
1       3     0x74a1,   41632  48.0°C      146.0W    NPS1, SPX, 0        134Mhz  900Mhz  0%   auto  750.0W  0%     0%
GPU[0]          : VRAM Total Memory (B): 206141652992
GPU[0]          : VRAM Total Used Memory (B): 187600000000
"""
