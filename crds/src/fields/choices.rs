//! Choices: fields with a fixed set of values.
//!
//! The values and their meanings are written once, on the enum variants. The schema lists the values, and
//! the description of a field ends with their meanings. The meanings pass from `JsonSchema` to the
//! definition in the schema's `title`, the only free text that Kubernetes' schemas keep.
//! [`crate::definitions`] merges the title into the description.

macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $word_doc:literal])+ $word:ident,)+ } default $default:ident) => {
        $(#[doc = $doc])+
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
        )]
        pub enum $name {
            $($(#[doc = $word_doc])+ $word,)+
        }

        impl $name {
            /// All values, in the order of their description.
            pub const ALL: &'static [$name] = &[$($name::$word),+];

            /// Returns the value as text.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$word => stringify!($word),)+
                }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                $name::$default
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let meanings = [$((stringify!($word), concat!($($word_doc),+).trim()),)+];
                let meanings: Vec<String> =
                    meanings.iter().map(|(word, meaning)| format!("`{word}`: {meaning}")).collect();
                schemars::json_schema!({
                    "type": "string",
                    "description": concat!($($doc),+).trim(),
                    "title": meanings.join(" "),
                    "enum": [$(stringify!($word)),+],
                })
            }
        }
    };
}

pub(crate) use choice;

choice! {
    /// I/O engine for devices.
    Engine {
        /// The kernel's io_uring with direct I/O.
        IoUring,
        /// `pread` and `pwrite` on a few threads; works everywhere.
        Plain,
        /// NVMe commands through io_uring, for raw devices only. Not in this release.
        IoUringCmd,
        /// The agent drives NVMe controllers itself, without the kernel: `devices` of class `NvmeController`. For
        /// a `directory`, it emulates a controller on the file, for tests.
        UserNvme,
        /// GPUDirect Storage through cuFile. Not in this release.
        Gds,
        /// NVMe queue pairs of GPUs, for raw devices only. Not in this release.
        GpuQueue,
    }
    default IoUring
}

choice! {
    /// Fallback if the requested engine is not available.
    FallbackEngine {
        /// The node's devices stay closed, and the agent reports the cause.
        None,
        /// The node uses `pread` and `pwrite`, and the agent reports it.
        Plain,
        /// The node uses io_uring, and the agent reports it.
        IoUring,
    }
    default None
}

choice! {
    /// Class of devices.
    DeviceClass {
        /// Block devices of the kernel.
        BlockDevice,
        /// NVMe controllers that are bound to vfio-pci. The agent has the whole controller.
        NvmeController,
    }
    default BlockDevice
}

choice! {
    /// Handling of a device with data of another program.
    ForeignSignatures {
        /// The agent does not use the device and reports it.
        Refuse,
        /// The agent overwrites the device. Needs `wipeConfirmation`.
        Wipe,
    }
    default Refuse
}

choice! {
    /// Mode of a node or pool.
    NodeMode {
        /// The node operates normally.
        Active,
        /// Engines on the node continue to use it. It receives no replicas of other nodes' blocks.
        Cordoned,
        /// As `Cordoned`, and blocks that exist only there are copied to other nodes.
        Draining,
    }
    default Active
}

choice! {
    /// Handling of the data when the object is deleted.
    DeletionPolicy {
        /// The data is kept, and a new pool on the same devices finds it.
        Retain,
        /// The data is destroyed before the object is removed. Needs `wipeConfirmation`.
        Wipe,
    }
    default Retain
}
