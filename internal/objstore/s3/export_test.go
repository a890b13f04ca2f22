package s3

import "github.com/minio/minio-go/v7"

// Core lets tests begin an upload and drop it, as a killed process does.
func (b *Bucket) Core() *minio.Core { return &b.core }

// NoOptions are plain put options.
var NoOptions = minio.PutObjectOptions{}
