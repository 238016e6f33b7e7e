//! Choices: a field that takes one of a few words.
//!
//! The words and what each does are written once, on the variants: the schema lists the words, and the description of a field
//! ends with them. Between `JsonSchema` and the definition the meanings travel as the schema's `title`, the one free text
//! that Kubernetes' schemas keep; [`crate::generated`] folds it into the description.

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
            /// All words, in the order in which they are described.
            pub const ALL: &'static [$name] = &[$($name::$word),+];

            /// The word.
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
    /// How blocks get to devices and back.
    Engine {
        /// Kernel's io_uring, direct I/O.
        IoUring,
        /// Calls of pread and pwrite on a few threads, works everywhere.
        Plain,
        /// NVMe commands passed through io_uring, raw devices only; not in this release.
        IoUringCmd,
        /// GPUDirect Storage through cuFile; not in this release.
        Gds,
        /// GPU's own NVMe queue pairs, raw devices only; not in this release.
        GpuQueue,
    }
    default IoUring
}

choice! {
    /// What happens where the wanted engine cannot be had.
    FallbackEngine {
        /// Nothing: the node's devices stay closed, and it says why.
        None,
        /// The node uses pread and pwrite, and says so.
        Plain,
        /// The node uses io_uring, and says so.
        IoUring,
    }
    default None
}

choice! {
    /// What happens to a device on which somebody else's data is found.
    ForeignSignatures {
        /// The device is left alone and reported.
        Refuse,
        /// The device is overwritten; needs `wipeConfirmation`.
        Wipe,
    }
    default Refuse
}

choice! {
    /// What a node or pool is used for.
    NodeMode {
        /// Everything.
        Active,
        /// Engines of the node go on; nothing is placed there for others.
        Cordoned,
        /// As `Cordoned`, and blocks that only it has are given to other nodes.
        Draining,
    }
    default Active
}

choice! {
    /// What is left on the nodes when the object is deleted.
    DeletionPolicy {
        /// The data stays and is found again by a pool of the same devices.
        Retain,
        /// The data is destroyed before the object goes; needs `wipeConfirmation`.
        Wipe,
    }
    default Retain
}
